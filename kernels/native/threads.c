/* The thread pool of torch: its OpenMP library's own entry points, so that no second pool competes for cores. */

#include "threads.h"

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*Number)(void);

static Parallel parallel;
static Number thread_number, thread_count;
static unsigned num_threads = 1;

/* with: GOMP_parallel; number: omp_get_thread_num; count: omp_get_num_threads. NULL: all runs on the caller. */
void use_threads(Parallel with, Number number, Number count, int64_t threads)
{
    parallel = with;
    thread_number = number;
    thread_count = count;
    num_threads = with && number && count ? (unsigned)threads : 1;
}

typedef struct {
    Range run;
    const void *args;
    int64_t n, next;
} Task;

static void run_share(void *data)
{
    const Task *task = data;
    int64_t number = thread_number(), count = thread_count();
    task->run(task->args, task->n * number / count, task->n * (number + 1) / count);
}

static void run_turns(void *data)
{
    Task *task = data;
    int64_t i;
    while ((i = __atomic_fetch_add(&task->next, 1, __ATOMIC_RELAXED)) < task->n)
        task->run(task->args, i, i + 1);
}

static void run_all(void (*body)(void *), Range run, const void *args, int64_t n, int64_t each)
{
    if (num_threads < 2 || n < 2 || n * each < 1 << 16) {
        run(args, 0, n);
        return;
    }
    Task task = {run, args, n, 0};
    parallel(body, &task, num_threads, 0);
}

void share(Range run, const void *args, int64_t n, int64_t each) { run_all(run_share, run, args, n, each); }

void share_in_turns(Range run, const void *args, int64_t n, int64_t each) { run_all(run_turns, run, args, n, each); }
