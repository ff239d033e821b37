"""QNN for Android from a Maven repository on loopback: verified, bounded, and enough to run ready bundles."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from elf_maker import make_elf
from farm_home import FarmHome
from maven_server import AARCH64, FOLDER, LICENCE, MavenServer, aar_files, maven_server, zipped
from small_disk import small_disk
from waiting import until

from farm.base.config.settings import Config, load_config
from farm.base.errors import InfraError, MissingToolError, UsageError
from farm.base.socs import find_soc
from farm.builds.runtime.runtime import attached_runtime
from farm.builds.toolchains import sdk_sources
from farm.builds.toolchains.sdk_sources import fetch_release, offered_release
from farm.builds.toolchains.sdks import find_cached, sdk_states

VERSION = "2.47.0"
AAR = f"{FOLDER}/{VERSION}/qnn-runtime-{VERSION}.aar"
POM = AAR.removesuffix(".aar") + ".pom"


@pytest.fixture
def server() -> Iterator[MavenServer]:
    with maven_server() as server:
        server.publish(VERSION, zipped(aar_files()))
        yield server


@pytest.fixture
def config(tmp_path: Path, server: MavenServer) -> Config:
    return msgspec.structs.replace(load_config(), cache_dir=tmp_path / "cache", maven_url=server.url)


def fetch(config: Config, wanted: str = "", sha256: str = "") -> Path:
    return fetch_release(config, offered_release(config, wanted), sha256)


def left_over(config: Config) -> list[Path]:
    folder = config.cache_dir / "sdks"
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def test_the_newest_release_becomes_a_runtime_with_skels_by_their_hexagon(config: Config, server: MavenServer) -> None:
    server.publish("2.9.1", zipped(aar_files()))
    offer = offered_release(config, "")
    assert (offer.version, offer.nbytes, offer.licence) == (VERSION, len(server.files[AAR]), LICENCE)
    root = fetch(config, sha256=hashlib.sha256(server.files[AAR]).hexdigest())
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    android = {f"lib/aarch64-android/libQnn{name}.so" for name in ("Gpu", "Htp", "HtpPrepare", "HtpV75Stub", "System")}
    skels = {f"lib/hexagon-v{arch}/unsigned/libQnnHtpV{arch}Skel.so" for arch in (73, 75)}
    assert files == {"LICENSE", "farm-fetched.json", "sdk.yaml", *android, *skels}
    assert fetch(config, "2.47") == root
    assert server.asked.count(AAR) == 1
    assert offered_release(config, "2.9").version == "2.9.1"


def test_it_is_enough_for_a_device_and_no_sdk_for_the_compiler(config: Config, tmp_path: Path) -> None:
    root = fetch(config)
    runner, backend = tmp_path / "farm_runner", tmp_path / "libqnn_executorch_backend.so"
    runner.write_bytes(make_elf(AARCH64, wide=True) + b"farm_runner")
    backend.write_bytes(make_elf(AARCH64, wide=True))
    phone = msgspec.structs.replace(config, android_qnn=root, android_runner=runner, android_backend_library=backend)
    made = attached_runtime(phone, find_soc("SM8650"), "htp")
    assert made.files["libQnnHtpV75Skel.so"] == root / "lib/hexagon-v75/unsigned/libQnnHtpV75Skel.so"
    assert made.versions["qnn"] == VERSION
    with pytest.raises(MissingToolError, match=r"libQnnHtpV79Skel\.so.*farm setup sdk fetch --source maven"):
        attached_runtime(phone, find_soc("SM8750"), "htp")
    assert find_cached(config, "2.47") is None
    [state] = [one for one in sdk_states(config) if one.root == root]
    assert (state.backends, state.problem, state.targets) == ((), "", ("android", "hexagon v73-v75"))


@pytest.mark.parametrize(
    ("path", "data", "problem"),
    [
        (AAR, b"other", "was damaged on the way: its sha1 is"),
        (POM, b"<project/>", "was damaged on the way: its sha1 is"),
        (f"{AAR}.sha1", b"<html>", "is no checksum"),
        (f"{AAR}.sha256", b"0" * 64, "its sha256 is"),
        (f"{FOLDER}/maven-metadata.xml", b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>", "has a document type"),
        (f"{FOLDER}/maven-metadata.xml", b"<html>sign in<br></html>", "is no XML"),
        (f"{FOLDER}/maven-metadata.xml", b" " * (2 << 20), "has more than 1048576 bytes"),
    ],
    ids=["aar", "pom", "no checksum", "better checksum", "entities", "page", "endless"],
)
def test_another_file_than_the_published_one_is_refused(
    config: Config, server: MavenServer, path: str, data: bytes, problem: str
) -> None:
    server.files[path] = data
    with pytest.raises(InfraError, match=problem):
        fetch(config)
    assert left_over(config) == []


def test_an_artifact_without_checksums_and_a_pom_of_another_one_are_refused(
    config: Config, server: MavenServer
) -> None:
    server.publish("2.48.0", zipped(aar_files()), checksums=("md5",))
    with pytest.raises(InfraError, match="has no checksum"):
        fetch(config, "2.48")
    server.publish("2.49.0", zipped(aar_files()))
    for suffix in ("", ".sha1", ".md5"):
        server.files[POM.replace(VERSION, "2.49.0") + suffix] = server.files[POM + suffix]
    with pytest.raises(InfraError, match=r"describes com\.qualcomm\.qti:qnn-runtime:2\.47\.0:aar, expected"):
        fetch(config, "2.49")
    with pytest.raises(MissingToolError, match=r"has no com\.qualcomm\.qti:qnn-runtime 2\.50: the newest are 2\.47\.0"):
        offered_release(config, "2.50")


@pytest.mark.parametrize(
    ("changes", "links", "problem"),
    [
        # tests/toolchains/test_sdks.py has all names and links that no archive may have.
        ({"../../evil": b"x"}, {}, "leads out of its folder"),
        ({"jni/arm64-v8a/libQnnHtp.so": make_elf(62, wide=True)}, {}, "libQnnHtp.so is made for x86-64"),
        ({"jni/arm64-v8a/libQnnGpu.so": b"text"}, {}, "libQnnGpu.so is no little-endian ELF file"),
        ({"jni/arm64-v8a/libQnnSystem.so": None}, {}, "it has no jni/arm64-v8a/libQnnSystem.so"),
        ({"real": b"1"}, {"q/NOTICE": "../real"}, "'q/NOTICE' in it is a link"),
        ({}, {"jni/arm64-v8a/libZ.so": "libQnnHtp.so"}, "in it is a link"),
        ({}, {"jni/arm64-v8a/libZ.so": "libZ.so"}, "libZ.so' in it"),
    ],
)
def test_an_archive_with_other_contents_is_refused(
    config: Config, server: MavenServer, changes: dict[str, bytes | None], links: dict[str, str], problem: str
) -> None:
    files = {name: data for name, data in (aar_files() | changes).items() if data is not None}
    server.publish(VERSION, zipped(files, links))
    with pytest.raises(InfraError, match=problem):
        fetch(config)
    assert left_over(config) == []


def test_a_folder_with_the_name_of_a_library_is_no_library(config: Config, server: MavenServer) -> None:
    server.publish(VERSION, zipped(aar_files() | {"jni/arm64-v8a/libF.so/": b""}))
    assert not (fetch(config) / "lib/aarch64-android/libF.so").exists()


@pytest.mark.parametrize("encoding", ["UTF-16", "nonsense", "utf-7"])
def test_an_xml_file_in_another_encoding_than_utf8_is_refused(
    config: Config, server: MavenServer, encoding: str
) -> None:
    text = f'<?xml version="1.0" encoding="{encoding}"?><!DOCTYPE x [<!ENTITY a "EXPANDED">]><project>&a;</project>'
    in_utf8 = text[: text.index("<!")].encode() + b"<a>+ADw-</a>"
    for data in (text.encode("utf-16"), text.encode("utf-16-le"), text.encode("cp037"), in_utf8):
        server.files[f"{FOLDER}/maven-metadata.xml"] = data
        with pytest.raises((InfraError, MissingToolError)) as raised:
            offered_release(config, "")
        assert "EXPANDED" not in str(raised.value)


def test_an_archive_that_unpacks_to_more_than_a_runtime_is_refused(
    config: Config, server: MavenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk_sources, "_MOST_UNPACKED", 10 << 20)
    server.publish(VERSION, zipped(aar_files() | {"assets/zeros": bytes(11 << 20)}))
    assert len(server.files[AAR]) < 100_000
    with pytest.raises(InfraError, match="it is larger than any SDK"):
        fetch(config)
    monkeypatch.setattr(sdk_sources, "_MOST_BYTES", 100)
    with pytest.raises(InfraError, match="it is not the expected file"):
        fetch(config)
    assert left_over(config) == []


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_continues(config: Config, server: MavenServer, *, ranges: bool) -> None:
    server.ranges, server.break_after = ranges, 700
    assert fetch(config).is_dir()
    assert server.asked.count(AAR) == 2


def test_an_address_that_is_not_safe_is_refused_also_behind_a_redirect(config: Config, server: MavenServer) -> None:
    for url in ("http://example.org/maven2", "ftp://127.0.0.1/", "file:///etc"):
        with pytest.raises(UsageError, match="expected an https address"):
            offered_release(msgspec.structs.replace(config, maven_url=url), "")
    with pytest.raises(InfraError, match="cannot fetch https://a..b/maven2/"):
        offered_release(msgspec.structs.replace(config, maven_url="https://a..b/maven2"), "")
    server.redirect = "http://example.org/qnn.aar"
    with pytest.raises(InfraError, match="https?://.* leads to http://example.org/qnn.aar, which is no https address"):
        fetch(config)
    assert left_over(config) == []


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "socks4://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_named(config: Config, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    for name in ("NO_PROXY", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(InfraError, match=r"cannot fetch .*: check the network, the proxy or the address"):
        offered_release(config, "")


def test_a_full_disk_leaves_nothing(config: Config, server: MavenServer, tmp_path: Path) -> None:
    server.publish(VERSION, zipped(aar_files() | {"assets/noise": os.urandom(3 << 20)}))
    with small_disk(tmp_path / "disk", "2m") as disk:
        small = msgspec.structs.replace(config, cache_dir=disk)
        with pytest.raises(InfraError, match="set FARM_CACHE_DIR to another folder"):
            fetch(small)
        assert left_over(small) == []


@pytest.fixture
def asked(home: FarmHome, tmp_path: Path, server: MavenServer) -> FarmHome:
    (home.cwd / "farm.toml").write_text(f'[qnn]\nmaven_url = "{server.url}"\n')
    return FarmHome(tmp_path / "own-cache", home.state, home.cwd)


FETCH = ("setup", "sdk", "fetch", "--source", "maven")


def test_size_and_licence_are_shown_and_consent_is_asked_for_once(asked: FarmHome, server: MavenServer) -> None:
    refused = asked.farm(*FETCH, code=2)
    assert LICENCE in refused.stderr
    assert f"kB from {server.url}" in refused.stderr.replace("\n", " ")
    assert AAR not in server.asked
    done = asked.farm(*FETCH, "--accept-licence", code=0)
    root = asked.cache / "sdks" / f"qnn-runtime-{VERSION}"
    assert done.stdout.strip() == str(root)
    assert f"FARM_ANDROID_QNN={root}" in done.stderr
    assert list(json.loads((asked.state / "licences.json").read_text())) == [LICENCE]
    server.publish("2.48.0", zipped(aar_files()))
    asked.farm(*FETCH, "2.48", code=0)
    listed = asked.json("setup", "sdk", "list")["sdks"]
    assert {one["version"] for one in listed if one["origin"].startswith("com.qualcomm")} == {VERSION, "2.48.0"}
    # The hash is compared also with a release in the cache.
    words = (*FETCH, VERSION, "--sha256")
    right = hashlib.sha256(server.files[AAR]).hexdigest()
    assert asked.farm(*words, right.upper(), code=0).stdout.strip() == str(root)
    assert f"SHA-256 {right}, expected 0000" in asked.farm(*words, "0" * 64, code=4).stderr.replace("\n", " ")
    # Another user could write into it.
    root.chmod(0o777)
    assert asked.farm(*FETCH, VERSION).returncode != 0


def test_the_address_of_the_command_line_is_taken(asked: FarmHome, server: MavenServer) -> None:
    (asked.cwd / "farm.toml").write_text('[qnn]\nmaven_url = "https://127.0.0.1:1/none"\n')
    words = (*FETCH, "--accept-licence")
    assert "cannot fetch https://127.0.0.1:1/none" in asked.farm(*words, code=4).stderr
    asked.farm(*words, "--url", f"{server.url}/", code=0)
    assert "expected an https address" in asked.farm(*words, "--url", "http://example.org", code=2).stderr
    assert "name one of them" in asked.farm("setup", "sdk", "fetch", "--url", server.url, code=2).stderr


def test_ctrl_c_leaves_nothing_and_the_next_call_fetches(asked: FarmHome, server: MavenServer) -> None:
    server.stop.clear()
    with asked.running(*FETCH, "--accept-licence") as farm:
        until(lambda: AAR in server.asked)
        os.kill(farm.pid, signal.SIGINT)
        farm.wait(60)
    assert farm.returncode != 0
    assert [path for path in (asked.cache / "sdks").iterdir() if path.is_dir()] == []
    server.stop.set()
    asked.farm(*FETCH, "--accept-licence", code=0)
