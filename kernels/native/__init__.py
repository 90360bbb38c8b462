"""Row-wise ops and attention of decode rows for bf16 on the CPU in C, compiled at start where there is a compiler."""
