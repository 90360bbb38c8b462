"""The folder of `--kv-disk` is tried out before a start, and refused with a sentence that names what is wrong."""

import errno
import os
import stat

import pytest

from engine.interface.errors import StartupError
from engine.tiers.block_folder import FOLDER_NAME, BlockFolder, check_folder


def test_a_new_folder_passes(tmp_path):
    check_folder(tmp_path / "a" / "b", size_bytes=2**20)
    assert stat.S_IMODE((tmp_path / "a" / "b" / FOLDER_NAME).stat().st_mode) == 0o700
    assert [file.name for file in (tmp_path / "a" / "b" / FOLDER_NAME).iterdir()] == ["lock"]


def test_a_size_beyond_the_disk_is_refused(tmp_path):
    with pytest.raises(StartupError, match=r"--kv-disk-size 1048576\.0 GiB is larger than the disk of .* GiB"):
        check_folder(tmp_path, size_bytes=2**50)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"--kv-disk .*file: the folder cannot be written: File exists"):
        check_folder(tmp_path / "file", size_bytes=1)
    with pytest.raises(StartupError, match=r"--kv-disk .*: the folder cannot be written: Not a directory"):
        check_folder(tmp_path / "file" / "x", size_bytes=1)


def test_a_link_in_place_of_its_own_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / FOLDER_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match=f"{FOLDER_NAME} is no folder"):
        check_folder(tmp_path, size_bytes=1)


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    check_folder(tmp_path, size_bytes=1)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StartupError, match=rf"belongs to user {owner}, and this is user {owner + 1}"):
        check_folder(tmp_path, size_bytes=1)


@pytest.mark.parametrize("fault", [errno.EROFS, errno.EACCES, errno.ENOLCK], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch, fault):
    def refuse(self):
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(BlockFolder, "try_out", refuse)
    with pytest.raises(StartupError, match=rf"--kv-disk .*: the folder cannot be written: {os.strerror(fault)}"):
        check_folder(tmp_path, size_bytes=1)
