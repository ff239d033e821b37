"""Lines that QNN, FastRPC and the loaders print for known troubles: party at fault, next step, retry. Data only.

`docs/reference/troubles.md` shows this table, and a test holds the two together. Lines come from QNN 2.51 and from
public issues of ExecuTorch, ONNX Runtime and FastRPC.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Party(StrEnum):
    """Part of the system that is at fault."""

    PROGRAM = "program"
    """The `.pte`, or how it was compiled."""
    RUNTIME = "runtime"
    """Libraries beside the program, or their places."""
    DEVICE = "device"
    """Firmware or access rights of one device."""
    SESSION = "session"
    """State of the DSP that a new session does not have."""


class Retry(StrEnum):
    """Place of the next try of a job with a known trouble."""

    NO = "no"
    SESSION = "new session"
    """In a new session on the same device, then on another device."""


class KnownTrouble(NamedTuple):
    """Row of the table of known troubles."""

    lines: tuple[str, ...]
    """Examples as a user sees them; every one matches `pattern`."""
    pattern: re.Pattern[str]
    """Repetitions are bounded: a hostile device decides how long a log is."""
    party: Party
    retry: Retry
    text: str
    """Explanation, part of a reason; names in braces are groups of the pattern."""
    next_step: str
    of_operator: bool = False
    """QNN prints the line while a program is compiled also for an operator that the CPU then runs."""


def _row(
    lines: str | tuple[str, ...],
    pattern: str,
    party: Party,
    text: str,
    next_step: str,
    retry: Retry = Retry.SESSION,
    *,
    of_operator: bool = False,
) -> KnownTrouble:
    named = (lines,) if isinstance(lines, str) else lines
    return KnownTrouble(named, re.compile(pattern), party, retry, text, next_step, of_operator)


_ONE_SDK = "take stub, skel and libQnnHtp.so from one QNN SDK (farm setup runtime check --soc SOC)"
_SPLIT = "divide it into more contexts, or make its weights smaller"
_ARCH = r"(?:68|69|73|75|79|81)"

LOADER_FAILURE = _row(
    (
        'CANNOT LINK EXECUTABLE "./farm_runner": library "libc++_shared.so" not found',
        "./farm_runner: error while loading shared libraries: libQnnSystem.so: cannot open shared object file",
    ),
    r"CANNOT LINK EXECUTABLE|error while loading shared libraries",
    Party.RUNTIME,
    "the loader of the device lacks a library of the runner",
    "add the named library to the runtime (farm setup runtime check --soc SOC)",
)
"""Row of a runner that did not start."""

TROUBLES: tuple[KnownTrouble, ...] = (
    LOADER_FAILURE,
    _row(
        (
            '<W> Failed in loading stub: dlopen failed: library "libQnnHtpV79Stub.so" not found',
            "libQnnHtpV79Stub.so: cannot open shared object file: No such file or directory",
        ),
        r'library "(?:[\w./-]{0,100}/)?(?P<stub>libQnn\w{1,20}Stub\.so)" not found|'
        r"(?P<stub2>libQnn\w{1,20}Stub\.so): cannot open shared object",
        Party.RUNTIME,
        "the stub library {stub} is missing beside libQnnHtp.so",
        "add {stub} of the same QNN SDK to the runtime (farm setup runtime check --soc SOC)",
    ),
    _row(
        (
            "<E> Stub lib id mismatch: expected (v2.28.2.241116104011), detected (v2.25.17.241017130936)",
            "<E> Skel lib id mismatch: devKey={deviceId=0 coreId=0 pdId=0} expected (v2.51.0.26), detected (v2.47.0)",
        ),
        r"(?:Stub|Skel) lib id mismatch: (?:devKey=\{[\w= ]{1,60}\} )?"
        r"expected \((?P<wanted>[\w.-]{1,60})\), detected \((?P<found>[\w.-]{1,60})\)",
        Party.RUNTIME,
        "stub and skel are of two QNN SDKs (expected {wanted}, found {found})",
        "take all libraries from one SDK, and look for another skel on the device that the system finds first "
        "(executorch #8762)",
    ),
    _row(
        "dlerror RX VA 0xFFF00000 outside ELF segment",
        r"RX VA 0x[0-9A-Fa-f]{1,16} outside ELF segment",
        Party.RUNTIME,
        "the firmware of the DSP does not accept the skel that it found",
        "take the skel of the runtime's SDK for this Hexagon, look for another one in /vendor, and separate folders in "
        "ADSP_LIBRARY_PATH by ';' (fastrpc #379)",
    ),
    _row(
        (
            "open_shell failed for domain 3 search paths used are /dsp/, /vendor/dsp/ (errno Permission denied)",
            "Error 0x80000580: apps_dev_init failed for domain 3, errno Success, ioErr -2147482240",
        ),
        r"(?:0x80000580\b|open_shell failed)",
        Party.DEVICE,
        "the firmware does not let this user open the DSP's shell (0x80000580)",
        "allow reading /vendor/dsp and /dev/fastrpc-* (root, SELinux), or ask the vendor for firmware that does",
    ),
    _row(
        "remote_init failed: cannot open /vendor/dsp/cdsp/fastrpc_shell_unsigned_3 (errno No such file or directory)",
        r"fastrpc_shell_unsigned_\d.{0,80}(?:No such file|not found|errno 0x2|error_code 0x2)|"
        r"(?:[Cc]annot|[Cc]ould not|[Ff]ailed to|[Uu]nable to|[Mm]issing).{0,80}fastrpc_shell_unsigned_\d",
        Party.DEVICE,
        "the firmware has no fastrpc_shell_unsigned_3, and without it the DSP runs no unsigned code",
        "install the DSP files of the same firmware build, or use another device",
    ),
    _row(
        "Error 0x8000054f: remote_handle64_open failed for file:///libQnnHtpV73Skel.so",
        r"0x8000054f\b",
        Party.DEVICE,
        "the firmware of the DSP refuses a process domain of this user (0x8000054f)",
        "install DSP firmware and shell files of one build, or use another device (fastrpc #188, #400)",
    ),
    _row(
        "Failed to open /dev/fastrpc-cdsp: Permission denied",
        r"/dev/(?:fastrpc-\w{1,20}|adsprpc\S{0,12})\W.{0,60}(?:Permission denied|No such file)|"
        r"(?:Permission denied|No such file)[^\n]{0,60}/dev/(?:fastrpc-|adsprpc)",
        Party.DEVICE,
        "the device node of FastRPC cannot be opened",
        "give the user of the connection access to /dev/fastrpc-*, or connect as root",
    ),
    _row(
        (
            "<E> DspTransport.createUnsignedPD unsigned PD or DSPRPC_GET_DSP_INFO not supported by HTP",
            "<E> Unable to load Skel Library. transportStatus: -1",
            "transportStatus = -1",
        ),
        r"createUnsignedPD.{0,120}not supported|transportStatus(?: ?=|:) ?-1\b",
        Party.DEVICE,
        "the firmware of the device supports no unsigned process domain",
        "use a device whose firmware does",
    ),
    _row(
        "qnn_executorch_open failed: 0x4e",
        r"Unable to find domain|remote_session_control failed|qnn_executorch_open failed",
        Party.DEVICE,
        "direct mode cannot open the DSP domain",
        "check that the device has this DSP, that its user may use FastRPC, and that the skels are signed where "
        "the domain asks for it (docs/guides/lpai_and_signing.md)",
    ),
    _row(
        "adsprpc: dynamic loading failed (dlerror signature verify start failed for libQnnLpaiSkel.so)",
        r"signature verify start failed",
        Party.RUNTIME,
        "the DSP does not accept the signature of the skel",
        "have it signed for this device (farm setup sign; docs/guides/lpai_and_signing.md), or use another device",
    ),
    _row(
        "adsprpc: untrusted app trying to offload to signed remote process",
        r"[Uu]ntrusted app trying to offload to signed remote process",
        Party.DEVICE,
        "this user may not open a signed process domain of the DSP",
        "run as root (adb root; docs/guides/lpai_and_signing.md)",
    ),
    _row(
        (
            "<E> DspTransport.openSession qnn_open failed, 0x80000416, prio 100",
            "<E> DspTransport.openSession qnn_open failed, 0x80000406",
            "<E> IDspTransport: Unable to load lib 0x80000600",
        ),
        r"(?:qnn_open failed,?|Unable to load lib) (?P<code>0x80000(?:416|406|600))\b",
        Party.RUNTIME,
        "the skel is not visible to the DSP ({code}), or has no signature that the DSP accepts",
        "put the skel of this Hexagon into a folder of ADSP_LIBRARY_PATH (';' between folders) that the DSP may read; "
        "for a signed process domain, have it signed for this device (docs/guides/lpai_and_signing.md; "
        "executorch #2788)",
    ),
    _row(
        ("No Snapdragon SOC detected", "<E> Failed to create transport for device, error: 4000"),
        r"No Snapdragon SOC detected(?!, defaulting)|"
        r"Failed to create transport (?:for device, error:|instance:) 4000\b",
        Party.RUNTIME,
        "the QNN SDK of the runtime does not know this SoC (error 4000): the SDK is older than the SoC",
        "take a newer QNN SDK for runtime and compiler (executorch #16465)",
    ),
    _row(
        (
            "QnnDsp <E> Unable to load Skel Library. transportStatus: 9",
            "<E> Unable to load Remote symbols 1008",
            "<E> Failed to load skel, error: 1008",
        ),
        r"Unable to load Skel Library|Failed to load skel, error|Unable to load Remote symbols 1008",
        Party.RUNTIME,
        "the DSP does not load the skel",
        "check that it is in ADSP_LIBRARY_PATH, is for this Hexagon, and is signed where the domain asks for it "
        "(executorch #8762)",
    ),
    _row(
        (
            "SSR Detected - You must free and recreate affected QNN API handles associated with deviceId 0 coreId 0",
            "<W> SSR detected on device config {0,0,0}. Thread will handle cleanup for all impacted sessions",
        ),
        r"SSR [Dd]etected",
        Party.SESSION,
        "the DSP was restarted (SSR), and every handle of the session is lost",
        "none where a new session runs it; else look at the DSP's crash log (executorch #3528)",
    ),
    _row(
        "[ERROR] [Qnn ExecuTorch]: qnn_graph_execute failed. Error 1007",
        r"(?:qnn_graph_execute failed\.|context from binary\.) Error 1007\b",
        Party.SESSION,
        "the connection to the DSP broke (QNN error 1007), and every handle of the session is lost",
        "none where a new session runs it; else look at the DSP's crash log",
    ),
    _row(
        "<E> Using newer context binary on old SDK",
        r"Using newer context binary on old SDK",
        Party.PROGRAM,
        "the program was compiled with a newer QNN than the runtime is of, and only the same or a newer one runs it",
        "take another runtime, as with --toolchain, or compile the program with an older QNN",
        Retry.NO,
    ),
    _row(
        "<E> Unsupported HTP arch 73 from device custom config",
        rf"Unsupported HTP [Aa]rch (?P<built>{_ARCH}) from device custom config",
        Party.PROGRAM,
        "the program was built for Hexagon V{built}, and the device has an older Hexagon",
        "compile it for the SoC of the device (executorch #1176)",
        Retry.NO,
    ),
    _row(
        "<E> [4294967295] has incorrect Value 68, expected >= 73.",
        rf"has incorrect Value (?P<has>{_ARCH}), expected >= (?P<built>{_ARCH})\b",
        Party.PROGRAM,
        "an operator was built for Hexagon V{built} with these data types, and the SoC has V{has}",
        "compile it in another precision, or for an SoC with a newer Hexagon",
        Retry.NO,
        of_operator=True,
    ),
    _row(
        "graph_prepare.cc:3207::ERROR:Output def has a bad scale (nan, inf, or too small).",
        r"has a bad scale \(nan, inf, or too small\)",
        Party.PROGRAM,
        "a value is infinite or NaN with the samples of the case",
        "use a finite mask such as -65504 in place of -inf, and clamp before exp, log and a division",
        Retry.NO,
    ),
    _row(
        "<E> Unsupported input/output datatypes requested for the HTP Op 'TransposeConv2d' in the node "
        "'aten_convolution_default'. There is a mismatch for the combination of inputs and outputs.",
        r"Unsupported input/output datatypes requested for the HTP Op '(?P<op>[\w.]{1,60})'",
        Party.PROGRAM,
        "HTP has no {op} with these data types",
        "compile it in another precision, or leave the node to the CPU (features.skip_node_ids)",
        Retry.NO,
        of_operator=True,
    ),
    _row(
        'A single op, "q::ForceFormat_Crouton" (Op ID: 1165b600001430), requires 0x2400000 bytes of TCM, which is '
        "greater than the TCM size of 0x800000!",
        r"[Rr]equires (?P<needed>0x[0-9a-fA-F]{1,15}) bytes of TCM",
        Party.PROGRAM,
        "an operator needs {needed} bytes of the DSP's own memory (TCM), and the SoC has less",
        "make its tensors smaller: divide the operator, or its spatial size or channels (executorch #1430)",
        Retry.NO,
    ),
    _row(
        "graph_prepare.cc:204:ERROR:could not create op: q::flat_from_vtcm",
        r"could not create op: (?P<op>q::[\w.]{1,60})",
        Party.PROGRAM,
        "HTP has no kernel for {op} with these types and shapes",
        "change shape or precision of the operator named beside it, or leave it to the CPU (onnxruntime #21800)",
        Retry.NO,
    ),
    _row(
        "graph requires estimated allocation of 4861664 KB, limit is 3670016 KB",
        r"requires estimated allocation of (?P<size>\d{1,15}) KB, limit is (?P<limit>\d{1,15}) KB",
        Party.PROGRAM,
        "a context of {size:,} KB is larger than the {limit:,} KB that the DSP, which addresses 4 GB, has for one",
        _SPLIT,
        Retry.NO,
    ),
    _row(
        (
            "<E> This META does not support far mapping. Cannot map larger than 4GB",
            "Size should be <= 4GB",
            "a context that exceeds 4GiB",
            "spill/fill >= 4GB",
        ),
        r"Cannot map larger than 4GB|Size should be <= 4GB|exceeds 4GiB|(?i:spill[ /]fill) >= 4GB",
        Party.PROGRAM,
        "a context is larger than the 4 GB that the DSP addresses",
        _SPLIT,
        Retry.NO,
    ),
    _row(
        "<E> Failed to find available PD for contextId 7 on deviceId 0 coreId 0 with context size estimate 9",
        r"Failed to find available PD for context",
        Party.PROGRAM,
        "no process domain of the DSP has room for one more context",
        "make fewer or smaller ones (executorch #14985)",
    ),
    _row(
        (
            "[ERROR] SMMU fastrpc mmap error (err 1002)",
            "<E> fastrpc memory map for fd: 33 with length: 817889280 failed with error: 0x1",
            "<E> Failed to map weights buffer to device!",
        ),
        r"SMMU fastrpc mmap error|SMMU mapping of .{1,60} failed|Could not SMMU map|Unable to map fd \d{1,10} len|"
        r"Failed to map weights buffer|fastrpc memory map for fd: \d{1,10} with length: \d{1,15} failed",
        Party.PROGRAM,
        "the DSP's SMMU cannot map the weights of a context (QNN error 1002), which devices do up to some hundred MB",
        f"{_SPLIT} (executorch #18862)",
    ),
    _row(
        "<E> Skel failed to process context binary.",
        r"Skel failed to process context binary",
        Party.RUNTIME,
        "the skel on the DSP does not read the context binary; its size is not the reason",
        f"{_ONE_SDK}, not older than the QNN that compiled the program (executorch #9084)",
    ),
    _row(
        "<E> Context create from binary failed for deviceId 0 coreId 0 pdId 0 err 1002",
        r"Context create from binary failed .{1,80}err 1002",
        Party.PROGRAM,
        "the DSP does not get the memory for a context (QNN error 1002)",
        "look at the lines above it in the log; end what else uses the DSP, or divide the program into more contexts",
    ),
    _row(
        "Failed to interpret QNN context binary. Error code 30010. Try verifying binary with online-prepare format.",
        r"Failed to interpret QNN context binary\. Error code 30010",
        Party.PROGRAM,
        "the program has no context binary for this runtime (30010)",
        "compile it for this backend and with the QNN of the runtime (executorch #6820)",
    ),
)
"""Causes come before their consequences: the first match decides."""
