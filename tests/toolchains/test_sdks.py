"""QNN SDKs in miniature: from ExecuTorch's real downloader and Maven, on loopback, or by pip from a folder."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from elf_maker import make_elf
from farm_home import FarmHome
from log_lines import LogLines
from made_environments import make_source_tree
from miniature_sdk import (
    AARCH64,
    FOLDER,
    HOST,
    LICENCE,
    VERSION,
    MavenServer,
    aar_files,
    give_downloader,
    make_library,
    make_wheel,
    maven_server,
    sdk_files,
    zipped,
    zipped_sdk,
)
from waiting import Started, until

from farm.base.config.settings import Config, load_config
from farm.base.config.toolchains import ToolchainConfig
from farm.base.errors import FarmError, InfraError, MissingToolError, UsageError
from farm.base.socs import find_soc
from farm.builds.runtime.qnn_sdk import linux_files
from farm.builds.runtime.runtime import attached_runtime
from farm.builds.toolchains import sdk_sources, sdks
from farm.builds.toolchains.sdk_archives import check_sdk, unpack

ARCHIVE = f"/maven2/v{VERSION}.zip"
RELEASE = "2.47.0"
AAR = f"{FOLDER}/{RELEASE}/qnn-runtime-{RELEASE}.aar"
POM = AAR.removesuffix(".aar") + ".pom"


@pytest.fixture
def server() -> Iterator[MavenServer]:
    with maven_server() as server:
        server.files[ARCHIVE] = zipped_sdk(sdk_files(), {f"{HOST}/libQnnHtp.so.2": "libQnnHtp.so"})
        server.publish(RELEASE, zipped(aar_files()))
        yield server


@pytest.fixture
def config(tmp_path: Path, server: MavenServer) -> Config:
    """A cache of its own, and a server on loopback for the toolchain's downloader and as Maven repository."""
    give_downloader(tmp_path / "executorch", server.url)
    toolchain = ToolchainConfig(name="main", executorch=tmp_path / "executorch")
    own = {"cache_dir": tmp_path / "cache", "toolchain": toolchain, "maven_url": server.url}
    return msgspec.structs.replace(load_config(), **own)


def left_over(cache: Path) -> list[Path]:
    return [path for path in (cache / "sdks").glob("*") if path.is_dir()]


def _fetch(config: Config, sha256: str = "") -> Path:
    return sdk_sources.fetch_sdk(config, sdk_sources.offered_sdk(config), sha256)


def test_the_sdk_of_executorchs_downloader_is_fetched_once_and_is_an_sdk_by_its_version(
    config: Config, server: MavenServer
) -> None:
    root = _fetch(config, hashlib.sha256(server.files[ARCHIVE]).hexdigest().upper())
    assert root == config.cache_dir / "sdks" / VERSION
    assert (root / "bin/x86_64-linux-clang/qnn-net-run").stat().st_mode & 0o111
    assert (root / HOST / "libQnnHtp.so.2").resolve() == root / HOST / "libQnnHtp.so"
    assert not list(root.rglob("*.zip"))
    noted = json.loads((root / "farm-fetched.json").read_text())
    assert noted["sha256"] == hashlib.sha256(server.files[ARCHIVE]).hexdigest()
    assert noted["licence_accepted"]
    assert _fetch(config) == root
    assert server.asked == [ARCHIVE]
    assert sdks.resolve_qnn(config, "2.37") == sdks.resolve_qnn(config, "v" + VERSION) == root


def test_another_archive_than_the_one_of_the_hash_is_refused_and_leaves_nothing(
    config: Config, server: MavenServer
) -> None:
    with pytest.raises(InfraError, match=r"has the SHA-256 [0-9a-f]{64}, expected 0000"):
        _fetch(config, "0" * 64)
    server.files[ARCHIVE] = b"<html>sign in first</html>"
    with pytest.raises(InfraError, match="it is damaged"):
        _fetch(config)
    assert left_over(config.cache_dir) == []


@pytest.mark.parametrize(
    ("url", "version"),
    [("http://example.org/sdk", VERSION), ("https://127.0.0.1", "../../etc"), ("file:///etc", VERSION)],
)
def test_only_versions_and_addresses_that_nobody_can_change_on_the_way_are_taken(
    config: Config, url: str, version: str
) -> None:
    assert config.toolchain.executorch is not None
    give_downloader(config.toolchain.executorch, url, version)
    with pytest.raises(MissingToolError, match="expected a version, and a zip file at an https address"):
        sdk_sources.offered_sdk(config)


def test_a_toolchain_without_a_downloader_is_named(config: Config, tmp_path: Path) -> None:
    bare = msgspec.structs.replace(config.toolchain, executorch=tmp_path)
    with pytest.raises(MissingToolError, match=r"the toolchain main has no backends/qualcomm/\S+sdk\.py"):
        sdk_sources.offered_sdk(msgspec.structs.replace(config, toolchain=bare))


def _refuse(folder: Path, archive: bytes, problem: str) -> None:
    """Unpack an archive, which is refused and leaves no file outside of its folder."""
    (folder / "sdk.zip").write_bytes(archive)
    target = folder / "inner" / "sdk"
    target.mkdir(parents=True)

    def unpack_it() -> None:
        unpack(folder / "sdk.zip", target, f"qairt/{VERSION}/", 1 << 30)
        check_sdk(target, VERSION)

    with pytest.raises(InfraError, match=problem):
        unpack_it()
    assert sorted(path.name for path in folder.iterdir()) == ["inner", "sdk.zip"]
    assert [path.name for path in (folder / "inner").iterdir()] == ["sdk"]


@pytest.mark.parametrize(
    ("changes", "links", "problem"),
    [
        *(
            ({name: b"evil"}, {}, "leads out of its folder")
            for name in ("../../../evil", "/etc/evil", "a\\..\\evil", "a//b", "./a", "lib/../../a")
        ),
        ({"x": b"1", "x/y": b"1"}, {}, "has a name that cannot be unpacked"),
        ({"a" * 300: b"1"}, {}, "has a name that cannot be unpacked"),
        ({}, {"out": "../../.."}, "the link 'out' in it leads out"),
        ({}, {"out": "/etc"}, "the link 'out' in it leads out"),
        ({}, {"lib/aarch64-android": "../bin"}, "lies behind a link"),
        ({}, {"deep/a/s": "../..", "t": "deep/a/s/../../../secret"}, "the link 't' in it leads through another one"),
        *(({}, {"q/l": to}, "q/l' in it has no target, or a damaged one") for to in ("a/" * 3000, "a\0b", "")),
        ({"sdk.yaml": b"version: 2.36.0.1\n"}, {}, f"its sdk.yaml has version 2.36.0.1, and {VERSION} was fetched"),
        ({f"{HOST}/libQnnHtp.so": make_elf(183, wide=True)}, {}, "libQnnHtp.so is made for AArch64, expected x86-64"),
        ({"lib/hexagon-v75/unsigned/a.so": b"no ELF"}, {}, "lib/hexagon-v75/unsigned/a.so: .*no little-endian ELF"),
        ({f"{HOST}/libQnnSystem.so": None}, {}, f"it has no {HOST}/libQnnSystem.so"),
    ],
)
def test_an_archive_that_is_no_sdk_or_leads_out_of_its_folder_is_refused(
    tmp_path: Path, changes: dict[str, bytes | None], links: dict[str, str], problem: str
) -> None:
    files = {name: data for name, data in (sdk_files() | changes).items() if data is not None}
    _refuse(tmp_path, zipped_sdk(files, links), problem)


@pytest.mark.parametrize(
    ("archive", "problem"),
    [
        (zipped_sdk(sdk_files())[:-40], "it is damaged"),
        (zipped_sdk(sdk_files()).replace(b"%PDF miniature", b"%PDF miniaturE"), "it is damaged"),
        (zipped_sdk(sdk_files(), version="2.31.0.1"), f"there is no qairt/{VERSION}/ in it"),
    ],
    ids=["cut", "flipped", "other version"],
)
def test_a_damaged_archive_is_refused(tmp_path: Path, archive: bytes, problem: str) -> None:
    _refuse(tmp_path, archive, problem)


@pytest.fixture
def licensed(home: FarmHome, tmp_path: Path, server: MavenServer) -> FarmHome:
    tree = make_source_tree(home.cwd / "executorch", "1.6.0a0", built=True)
    give_downloader(tree, server.url)
    return FarmHome(tmp_path / "own-cache", home.state, home.cwd)


def test_without_a_terminal_nothing_is_fetched_until_it_is_accepted(licensed: FarmHome, server: MavenServer) -> None:
    words = ("setup", "sdk", "fetch", "--toolchain", "./executorch", "--source", "qairt")
    refused = licensed.farm(*words, code=2)
    assert (refused.stdout, server.asked) == ("", [])
    assert "LICENSE.pdf" in refused.stderr
    assert refused.stderr.rstrip().endswith("read it and add --accept-licence")
    root = Path(licensed.farm(*words, "--accept-licence", code=0).stdout.strip())
    assert root == licensed.cache / "sdks" / VERSION
    assert licensed.farm(*words, "2.37", code=0).stdout.strip() == str(root)
    assert server.asked == [ARCHIVE]
    # Hash and source are compared also with an SDK in the cache.
    assert "expected 0000" in licensed.farm(*words, "--sha256", "0" * 64, code=4).stderr.replace("\n", " ")
    marker = root / "farm-fetched.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"origin": "onnxruntime-qnn 2.5.0"}))
    assert licensed.farm(*words, code=0).stdout.strip() == str(root)
    assert server.asked == [ARCHIVE] * 2
    assert json.loads(marker.read_text())["origin"].startswith(server.url)


def test_on_a_terminal_it_is_asked_and_taken_by_yes_alone(licensed: FarmHome, server: MavenServer) -> None:
    argv = [sys.executable, "-m", "farm.cli.main", "setup", "sdk", "fetch", "--toolchain", "./executorch"]
    master, slave = pty.openpty()
    os.write(master, b"n\n")
    with Started(argv, env=licensed.env, cwd=licensed.cwd, stdin=slave, stdout=subprocess.PIPE, stderr=slave) as farm:
        os.close(slave)
        farm.communicate(timeout=60)
    # The terminal keeps unread output.
    text = os.read(master, 65536).decode()
    os.close(master)
    assert "Do you accept the licence? [y/N]" in text
    assert server.url in text
    assert (farm.returncode, server.asked) == (2, []), text


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_library(tmp_path_factory.mktemp("library") / "libQnnHtp.so", "v2.49.40.260810104044")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_a_version_of_qnn_is_found_in_its_wheel_and_becomes_an_sdk(config: Config, index: Path, library: Path) -> None:
    make_wheel(index, "2.5.0", library, "2.49.40")
    lines = LogLines()
    root = sdk_sources.fetch_wheel_sdk(config.cache_dir, "2.49")
    assert lines == ["fetching onnxruntime-qnn 2.5.0, about 100 MB"]
    assert root.name == "2.49.40.260810104044"
    names = ["libQnnHtp.so", "libQnnSystem.so", "libc++-1234.so.1.0"]
    assert sorted(path.name for path in (root / HOST).iterdir()) == names
    assert sdk_sources.fetch_wheel_sdk(config.cache_dir, "2.49.40") == root == sdks.resolve_qnn(config, "2.49")
    assert len(lines) == 1
    # Arm Linux devices get the same release, not the release in farm's environment.
    assert linux_files(root, config.cache_dir).version == "onnxruntime-qnn 2.5.0"
    assert not list((config.cache_dir / "fetching").iterdir())


def test_a_wheel_that_has_another_version_than_is_known_of_it_is_refused(
    config: Config, index: Path, library: Path
) -> None:
    make_wheel(index, "2.4.0", library, "2.48.40")
    with pytest.raises(InfraError, match=r"onnxruntime_qnn-2\.4\.0.* has QNN 2\.49\.40\S+, expected 2\.48\.40"):
        sdk_sources.fetch_wheel_sdk(config.cache_dir, "2.48")
    assert sdks.installed_sdks(config)[1:] == []


def test_a_version_that_no_wheel_has_lists_those_there_are(config: Config, index: Path) -> None:
    del index
    with pytest.raises(MissingToolError) as raised:
        sdk_sources.fetch_wheel_sdk(config.cache_dir, "2.33")
    assert all(qnn in str(raised.value) for qnn in sdk_sources.KNOWN_WHEELS.values())
    assert sdk_sources.candidates("2.47.0.1") == ["2.3.0"]


@pytest.mark.whole
@pytest.mark.parametrize("qnn", ["2.47", pytest.param("2.49", marks=pytest.mark.soak)])
def test_smoke_runs_on_the_simulator_of_another_qnn(home: FarmHome, tmp_path: Path, qnn: str) -> None:
    fetched = FarmHome(tmp_path / "fetched", home.state, home.cwd).farm(
        "setup", "sdk", "fetch", qnn, timeout_s=600, code=0
    )
    root = fetched.stdout.strip()
    home.use_one_builder()
    with (home.cwd / "farm.toml").open("a") as config:
        config.write(f'[toolchain.other]\npython = "{sys.executable}"\nqnn = "{root}"\n')
    run = home.json("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "1", "--toolchain", "other",
                    timeout_s=600)  # fmt: skip
    assert run["fingerprint"]["qnn"].startswith(f"v{qnn}.")


def test_what_is_named_is_used_or_refused(config: Config, tmp_path: Path) -> None:
    here = sdks.wheel_version()
    assert sdks.resolve_qnn(config, ".".join(here.split(".")[:2])) is None
    missing = rf"QNN 2\.9 is not on this machine, there is {here}: run 'farm setup sdk fetch 2\.9'"
    for text, kind, problem in [
        ("2.9", MissingToolError, missing),
        ("newest", UsageError, "QNN 'newest' is neither a version such as 2.49 nor a path"),
        ("/nope", MissingToolError, "^/nope: there is no such folder"),
        (str(tmp_path), MissingToolError, f"has no {HOST}/libQnnHtp.so to compile with"),
    ]:
        with pytest.raises(kind, match=problem):
            sdks.resolve_qnn(config, text)


def test_the_newest_build_of_a_version_is_taken_and_a_longer_number_is_no_prefix(config: Config) -> None:
    for version in ("2.37.0.250724", "2.37.1.250801", "2.370.0.1"):
        root = config.cache_dir / "sdks" / version
        for name, content in sdk_files(version).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
    assert sdks.resolve_qnn(config, "2.37") == config.cache_dir / "sdks" / "2.37.1.250801"
    assert sdks.resolve_qnn(config, "2.37.0") == config.cache_dir / "sdks" / "2.37.0.250724"


def test_native_folders_are_those_of_the_qnn_table(tmp_path: Path) -> None:
    (tmp_path / "build-android").mkdir()
    toolchain = ToolchainConfig(name="main", native={"android-arm64": tmp_path / "build-android"})
    fields = sdks.native_fields(toolchain)
    assert fields["executorch_build"] == fields["android_executorch"] == tmp_path / "build-android"
    # Made with another ExecuTorch.
    assert fields["android_runner"] is fields["android_backend_library"] is None
    for native, problem in [
        ({"android": tmp_path}, "native.android: there is no such target, legal are android-arm64"),
        ({"direct": tmp_path / "none"}, "toolchain.main: native.direct: .*none is no folder"),
    ]:
        with pytest.raises(UsageError, match=problem):
            sdks.native_fields(msgspec.structs.replace(toolchain, native=native))


def test_an_sdk_that_is_named_and_not_there_ends_a_run_before_it_begins(home: FarmHome) -> None:
    run = ("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "1")
    assert "QNN_SDK_ROOT=/nope: there is no such folder" in home.farm(
        *run, env={"QNN_SDK_ROOT": "/nope"}, code=6
    ).stderr  # fmt: skip
    (home.cwd / "farm.toml").write_text('[qnn]\nsdk_root = "gone"\n')
    named = "sdk_root in the [qnn] table of farm.toml: there is no such folder as the QNN SDK"
    assert f"{named} {home.cwd}/gone" in home.farm(*run, code=6).stderr


def test_an_sdk_goes_when_nothing_names_it(config: Config) -> None:
    root = _fetch(config)
    (found,) = sdks.cached_sdks(config)
    assert (found.version, found.named) == (VERSION, False)
    assert sdks.removable_sdks(config, None) == sdks.removable_sdks(config, 3600) == []
    assert sdks.removable_sdks(msgspec.structs.replace(config, sdk_root=root), 0) == []
    table = {"main": ToolchainConfig(name="main", named=True, qnn="2.37")}
    assert sdks.removable_sdks(msgspec.structs.replace(config, toolchains=table), -10) == []
    layout = config.cache_dir / "sdk" / "layout" / "lib/x86_64-linux-clang/real"
    layout.mkdir(parents=True)
    (layout / "libQnnHtp.so").symlink_to(root / HOST / "libQnnHtp.so")
    sdks.remove_sdk(config, found)
    assert not root.exists()
    assert not (config.cache_dir / "sdk" / "layout").exists()
    with pytest.raises(FarmError, match="farm setup sdk fetch"):
        sdks.resolve_qnn(config, "2.37")


def fetch_aar(config: Config, wanted: str = "", sha256: str = "") -> Path:
    return sdk_sources.fetch_release(config, sdk_sources.offered_release(config, wanted), sha256)


def test_the_newest_release_becomes_a_runtime_with_skels_by_their_hexagon(config: Config, server: MavenServer) -> None:
    server.publish("2.9.1", zipped(aar_files()))
    offer = sdk_sources.offered_release(config, "")
    assert (offer.version, offer.nbytes, offer.licence) == (RELEASE, len(server.files[AAR]), LICENCE)
    root = fetch_aar(config, sha256=hashlib.sha256(server.files[AAR]).hexdigest())
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    android = {f"lib/aarch64-android/libQnn{name}.so" for name in ("Gpu", "Htp", "HtpPrepare", "HtpV75Stub", "System")}
    skels = {f"lib/hexagon-v{arch}/unsigned/libQnnHtpV{arch}Skel.so" for arch in (73, 75)}
    assert files == {"LICENSE", "farm-fetched.json", "sdk.yaml", *android, *skels}
    assert fetch_aar(config, "2.47") == root
    assert server.asked.count(AAR) == 1
    assert sdk_sources.offered_release(config, "2.9").version == "2.9.1"


def test_it_is_enough_for_a_device_and_no_sdk_for_the_compiler(config: Config, tmp_path: Path) -> None:
    root = fetch_aar(config)
    runner, backend = tmp_path / "farm_runner", tmp_path / "libqnn_executorch_backend.so"
    runner.write_bytes(make_elf(AARCH64, wide=True) + b"farm_runner")
    backend.write_bytes(make_elf(AARCH64, wide=True))
    phone = msgspec.structs.replace(config, android_qnn=root, android_runner=runner, android_backend_library=backend)
    made = attached_runtime(phone, find_soc("SM8650"), "htp")
    assert made.files["libQnnHtpV75Skel.so"] == root / "lib/hexagon-v75/unsigned/libQnnHtpV75Skel.so"
    assert made.versions["qnn"] == RELEASE
    with pytest.raises(MissingToolError, match=r"libQnnHtpV79Skel\.so.*farm setup sdk fetch --source maven"):
        attached_runtime(phone, find_soc("SM8750"), "htp")
    assert sdks.find_cached(config, "2.47") is None
    [state] = [one for one in sdks.sdk_states(config) if one.root == root]
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
        fetch_aar(config)
    assert left_over(config.cache_dir) == []


def test_an_artifact_without_checksums_and_a_pom_of_another_one_are_refused(
    config: Config, server: MavenServer
) -> None:
    server.publish("2.48.0", zipped(aar_files()), checksums=("md5",))
    with pytest.raises(InfraError, match="has no checksum"):
        fetch_aar(config, "2.48")
    server.publish("2.49.0", zipped(aar_files()))
    for suffix in ("", ".sha1", ".md5"):
        server.files[POM.replace(RELEASE, "2.49.0") + suffix] = server.files[POM + suffix]
    with pytest.raises(InfraError, match=r"describes com\.qualcomm\.qti:qnn-runtime:2\.47\.0:aar, expected"):
        fetch_aar(config, "2.49")
    with pytest.raises(MissingToolError, match=r"has no com\.qualcomm\.qti:qnn-runtime 2\.50: the newest are 2\.47\.0"):
        sdk_sources.offered_release(config, "2.50")


@pytest.mark.parametrize(
    ("changes", "links", "problem"),
    [
        # The test above has all names and links that no archive may have.
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
    server.publish(RELEASE, zipped(files, links))
    with pytest.raises(InfraError, match=problem):
        fetch_aar(config)
    assert left_over(config.cache_dir) == []


def test_a_folder_with_the_name_of_a_library_is_no_library(config: Config, server: MavenServer) -> None:
    server.publish(RELEASE, zipped(aar_files() | {"jni/arm64-v8a/libF.so/": b""}))
    assert not (fetch_aar(config) / "lib/aarch64-android/libF.so").exists()


@pytest.mark.parametrize("encoding", ["UTF-16", "nonsense", "utf-7"])
def test_an_xml_file_in_another_encoding_than_utf8_is_refused(
    config: Config, server: MavenServer, encoding: str
) -> None:
    text = f'<?xml version="1.0" encoding="{encoding}"?><!DOCTYPE x [<!ENTITY a "EXPANDED">]><project>&a;</project>'
    in_utf8 = text[: text.index("<!")].encode() + b"<a>+ADw-</a>"
    for data in (text.encode("utf-16"), text.encode("utf-16-le"), text.encode("cp037"), in_utf8):
        server.files[f"{FOLDER}/maven-metadata.xml"] = data
        with pytest.raises((InfraError, MissingToolError)) as raised:
            sdk_sources.offered_release(config, "")
        assert "EXPANDED" not in str(raised.value)


def test_an_archive_that_unpacks_to_more_than_a_runtime_is_refused(
    config: Config, server: MavenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk_sources, "_MOST_UNPACKED", 10 << 20)
    server.publish(RELEASE, zipped(aar_files() | {"assets/zeros": bytes(11 << 20)}))
    assert len(server.files[AAR]) < 100_000
    with pytest.raises(InfraError, match="it is larger than any SDK"):
        fetch_aar(config)
    monkeypatch.setattr(sdk_sources, "_MOST_BYTES", 100)
    with pytest.raises(InfraError, match="it is not the expected file"):
        fetch_aar(config)
    assert left_over(config.cache_dir) == []


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_continues(config: Config, server: MavenServer, *, ranges: bool) -> None:
    server.ranges, server.break_after = ranges, 700
    assert fetch_aar(config).is_dir()
    assert server.asked.count(AAR) == 2


def test_an_address_that_is_not_safe_is_refused_also_behind_a_redirect(config: Config, server: MavenServer) -> None:
    for url in ("http://example.org/maven2", "ftp://127.0.0.1/", "file:///etc"):
        with pytest.raises(UsageError, match="expected an https address"):
            sdk_sources.offered_release(msgspec.structs.replace(config, maven_url=url), "")
    with pytest.raises(InfraError, match="cannot fetch https://a..b/maven2/"):
        sdk_sources.offered_release(msgspec.structs.replace(config, maven_url="https://a..b/maven2"), "")
    server.redirect = "http://example.org/qnn.aar"
    with pytest.raises(InfraError, match="https?://.* leads to http://example.org/qnn.aar, which is no https address"):
        fetch_aar(config)
    assert left_over(config.cache_dir) == []


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "socks4://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_named(config: Config, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    for name in ("NO_PROXY", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(InfraError, match=r"cannot fetch .*: check the network, the proxy or the address"):
        sdk_sources.offered_release(config, "")


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
    root = asked.cache / "sdks" / f"qnn-runtime-{RELEASE}"
    assert done.stdout.strip() == str(root)
    assert f"FARM_ANDROID_QNN={root}" in done.stderr
    assert list(json.loads((asked.state / "licences.json").read_text())) == [LICENCE]
    server.publish("2.48.0", zipped(aar_files()))
    asked.farm(*FETCH, "2.48", code=0)
    listed = asked.json("setup", "sdk", "list")["sdks"]
    assert {one["version"] for one in listed if one["origin"].startswith("com.qualcomm")} == {RELEASE, "2.48.0"}
    # The hash is compared also with a release in the cache.
    words = (*FETCH, RELEASE, "--sha256")
    right = hashlib.sha256(server.files[AAR]).hexdigest()
    assert asked.farm(*words, right.upper(), code=0).stdout.strip() == str(root)
    assert f"SHA-256 {right}, expected 0000" in asked.farm(*words, "0" * 64, code=4).stderr.replace("\n", " ")
    # Another user could write into it.
    root.chmod(0o777)
    assert asked.farm(*FETCH, RELEASE).returncode != 0


def test_the_address_of_the_repository_is_that_of_farm_toml_and_checked(asked: FarmHome) -> None:
    for address, code, problem in (
        ("https://127.0.0.1:1/none", 4, "cannot fetch https://127.0.0.1:1/none"),
        ("http://example.org", 2, "expected an https address"),
    ):
        (asked.cwd / "farm.toml").write_text(f'[qnn]\nmaven_url = "{address}"\n')
        assert problem in asked.farm(*FETCH, "--accept-licence", code=code).stderr


def test_ctrl_c_leaves_nothing_and_the_next_call_fetches(asked: FarmHome, server: MavenServer) -> None:
    server.stop.clear()
    with asked.running(*FETCH, "--accept-licence") as farm:
        until(lambda: AAR in server.asked)
        os.kill(farm.pid, signal.SIGINT)
        farm.wait(60)
    assert farm.returncode != 0
    assert left_over(asked.cache) == []
    server.stop.set()
    asked.farm(*FETCH, "--accept-licence", code=0)
