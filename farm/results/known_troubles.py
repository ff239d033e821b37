"""Lines that QNN, FastRPC and the loaders print for known troubles: party at fault, next step, retry. Data only.

`docs/reference/troubles.md` shows this table with examples of the lines, and a test holds the two together. Lines come
from QNN 2.51 and from public issues of ExecuTorch, ONNX Runtime and FastRPC.
"""

from __future__ import annotations

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
    """Row of the table of known troubles; `docs/reference/troubles.md` has examples of its lines."""

    pattern: str
    """Regular expression. Repetitions are bounded: a hostile device decides how long a log is."""
    party: Party
    text: str
    """Explanation, part of a reason; names in braces are groups of the pattern."""
    next_step: str
    retry: Retry = Retry.SESSION
    of_operator: bool = False
    """QNN prints the line while a program is compiled also for an operator that the CPU then runs."""


_ONE_SDK = "take stub, skel and libQnnHtp.so from one QNN SDK (farm setup runtime check --soc SOC)"
_SPLIT = "divide it into more contexts, or make its weights smaller"
_ARCH = r"(?:68|69|73|75|79|81)"

LOADER_FAILURE = KnownTrouble(
    r"CANNOT LINK EXECUTABLE|error while loading shared libraries",
    Party.RUNTIME,
    "the loader of the device lacks a library of the runner",
    "add the named library to the runtime (farm setup runtime check --soc SOC)",
)
"""Row of a runner that did not start."""

TROUBLES: tuple[KnownTrouble, ...] = (
    LOADER_FAILURE,
    KnownTrouble(
        r'library "(?:[\w./-]{0,100}/)?(?P<stub>libQnn\w{1,20}Stub\.so)" not found|'
        r"(?P<stub2>libQnn\w{1,20}Stub\.so): cannot open shared object",
        Party.RUNTIME,
        "the stub library {stub} is missing beside libQnnHtp.so",
        "add {stub} of the same QNN SDK to the runtime (farm setup runtime check --soc SOC)",
    ),
    KnownTrouble(
        r"(?:Stub|Skel) lib id mismatch: (?:devKey=\{[\w= ]{1,60}\} )?"
        r"expected \((?P<wanted>[\w.-]{1,60})\), detected \((?P<found>[\w.-]{1,60})\)",
        Party.RUNTIME,
        "stub and skel are of two QNN SDKs (expected {wanted}, found {found})",
        "take all libraries from one SDK, and look for another skel on the device that the system finds first "
        "(executorch #8762)",
    ),
    KnownTrouble(
        r"RX VA 0x[0-9A-Fa-f]{1,16} outside ELF segment",
        Party.RUNTIME,
        "the firmware of the DSP does not accept the skel that it found",
        "take the skel of the runtime's SDK for this Hexagon, look for another one in /vendor, and separate folders in "
        "ADSP_LIBRARY_PATH by ';' (fastrpc #379)",
    ),
    KnownTrouble(
        r"(?:0x80000580\b|open_shell failed)",
        Party.DEVICE,
        "the firmware does not let this user open the DSP's shell (0x80000580)",
        "allow reading /vendor/dsp and /dev/fastrpc-* (root, SELinux), or ask the vendor for firmware that does",
    ),
    KnownTrouble(
        r"fastrpc_shell_unsigned_\d.{0,80}(?:No such file|not found|errno 0x2|error_code 0x2)|"
        r"(?:[Cc]annot|[Cc]ould not|[Ff]ailed to|[Uu]nable to|[Mm]issing).{0,80}fastrpc_shell_unsigned_\d",
        Party.DEVICE,
        "the firmware has no fastrpc_shell_unsigned_3, and without it the DSP runs no unsigned code",
        "install the DSP files of the same firmware build, or use another device",
    ),
    KnownTrouble(
        r"0x8000054f\b",
        Party.DEVICE,
        "the firmware of the DSP refuses a process domain of this user (0x8000054f)",
        "install DSP firmware and shell files of one build, or use another device (fastrpc #188, #400)",
    ),
    KnownTrouble(
        r"/dev/(?:fastrpc-\w{1,20}|adsprpc\S{0,12})\W.{0,60}(?:Permission denied|No such file)|"
        r"(?:Permission denied|No such file)[^\n]{0,60}/dev/(?:fastrpc-|adsprpc)",
        Party.DEVICE,
        "the device node of FastRPC cannot be opened",
        "give the user of the connection access to /dev/fastrpc-*, or connect as root",
    ),
    KnownTrouble(
        r"createUnsignedPD.{0,120}not supported|transportStatus(?: ?=|:) ?-1\b",
        Party.DEVICE,
        "the firmware of the device supports no unsigned process domain",
        "use a device whose firmware does",
    ),
    KnownTrouble(
        r"Unable to find domain|remote_session_control failed|qnn_executorch_open failed",
        Party.DEVICE,
        "direct mode cannot open the DSP domain",
        "check that the device has this DSP, that its user may use FastRPC, and that the skels are signed where "
        "the domain asks for it (docs/guides/lpai_and_signing.md)",
    ),
    KnownTrouble(
        r"signature verify start failed",
        Party.RUNTIME,
        "the DSP does not accept the signature of the skel",
        "have it signed for this device (farm setup sign; docs/guides/lpai_and_signing.md), or use another device",
    ),
    KnownTrouble(
        r"[Uu]ntrusted app trying to offload to signed remote process",
        Party.DEVICE,
        "this user may not open a signed process domain of the DSP",
        "run as root (adb root; docs/guides/lpai_and_signing.md)",
    ),
    KnownTrouble(
        r"(?:qnn_open failed,?|Unable to load lib) (?P<code>0x80000(?:416|406|600))\b",
        Party.RUNTIME,
        "the skel is not visible to the DSP ({code}), or has no signature that the DSP accepts",
        "put the skel of this Hexagon into a folder of ADSP_LIBRARY_PATH (';' between folders) that the DSP may read; "
        "for a signed process domain, have it signed for this device (docs/guides/lpai_and_signing.md; "
        "executorch #2788)",
    ),
    KnownTrouble(
        r"No Snapdragon SOC detected(?!, defaulting)|"
        r"Failed to create transport (?:for device, error:|instance:) 4000\b",
        Party.RUNTIME,
        "the QNN SDK of the runtime does not know this SoC (error 4000): the SDK is older than the SoC",
        "take a newer QNN SDK for runtime and compiler (executorch #16465)",
    ),
    KnownTrouble(
        r"Unable to load Skel Library|Failed to load skel, error|Unable to load Remote symbols 1008",
        Party.RUNTIME,
        "the DSP does not load the skel",
        "check that it is in ADSP_LIBRARY_PATH, is for this Hexagon, and is signed where the domain asks for it "
        "(executorch #8762)",
    ),
    KnownTrouble(
        r"SSR [Dd]etected",
        Party.SESSION,
        "the DSP was restarted (SSR), and every handle of the session is lost",
        "none where a new session runs it; else look at the DSP's crash log (executorch #3528)",
    ),
    KnownTrouble(
        r"(?:qnn_graph_execute failed\.|context from binary\.) Error 1007\b",
        Party.SESSION,
        "the connection to the DSP broke (QNN error 1007), and every handle of the session is lost",
        "none where a new session runs it; else look at the DSP's crash log",
    ),
    KnownTrouble(
        r"Using newer context binary on old SDK",
        Party.PROGRAM,
        "the program was compiled with a newer QNN than the runtime is of, and only the same or a newer one runs it",
        "take another runtime, as with --toolchain, or compile the program with an older QNN",
        Retry.NO,
    ),
    KnownTrouble(
        rf"Unsupported HTP [Aa]rch (?P<built>{_ARCH}) from device custom config",
        Party.PROGRAM,
        "the program was built for Hexagon V{built}, and the device has an older Hexagon",
        "compile it for the SoC of the device (executorch #1176)",
        Retry.NO,
    ),
    KnownTrouble(
        rf"has incorrect Value (?P<has>{_ARCH}), expected >= (?P<built>{_ARCH})\b",
        Party.PROGRAM,
        "an operator was built for Hexagon V{built} with these data types, and the SoC has V{has}",
        "compile it in another precision, or for an SoC with a newer Hexagon",
        Retry.NO,
        of_operator=True,
    ),
    KnownTrouble(
        r"has a bad scale \(nan, inf, or too small\)",
        Party.PROGRAM,
        "a value is infinite or NaN with the samples of the case",
        "use a finite mask such as -65504 in place of -inf, and clamp before exp, log and a division",
        Retry.NO,
    ),
    KnownTrouble(
        r"Unsupported input/output datatypes requested for the HTP Op '(?P<op>[\w.]{1,60})'",
        Party.PROGRAM,
        "HTP has no {op} with these data types",
        "compile it in another precision, or leave the node to the CPU (features.skip_node_ids)",
        Retry.NO,
        of_operator=True,
    ),
    KnownTrouble(
        r"[Rr]equires (?P<needed>0x[0-9a-fA-F]{1,15}) bytes of TCM",
        Party.PROGRAM,
        "an operator needs {needed} bytes of the DSP's own memory (TCM), and the SoC has less",
        "make its tensors smaller: divide the operator, or its spatial size or channels (executorch #1430)",
        Retry.NO,
    ),
    KnownTrouble(
        r"could not create op: (?P<op>q::[\w.]{1,60})",
        Party.PROGRAM,
        "HTP has no kernel for {op} with these types and shapes",
        "change shape or precision of the operator named beside it, or leave it to the CPU (onnxruntime #21800)",
        Retry.NO,
    ),
    KnownTrouble(
        r"requires estimated allocation of (?P<size>\d{1,15}) KB, limit is (?P<limit>\d{1,15}) KB",
        Party.PROGRAM,
        "a context of {size:,} KB is larger than the {limit:,} KB that the DSP, which addresses 4 GB, has for one",
        _SPLIT,
        Retry.NO,
    ),
    KnownTrouble(
        r"Cannot map larger than 4GB|Size should be <= 4GB|exceeds 4GiB|(?i:spill[ /]fill) >= 4GB",
        Party.PROGRAM,
        "a context is larger than the 4 GB that the DSP addresses",
        _SPLIT,
        Retry.NO,
    ),
    KnownTrouble(
        r"Failed to find available PD for context",
        Party.PROGRAM,
        "no process domain of the DSP has room for one more context",
        "make fewer or smaller ones (executorch #14985)",
    ),
    KnownTrouble(
        r"SMMU fastrpc mmap error|SMMU mapping of .{1,60} failed|Could not SMMU map|Unable to map fd \d{1,10} len|"
        r"Failed to map weights buffer|fastrpc memory map for fd: \d{1,10} with length: \d{1,15} failed",
        Party.PROGRAM,
        "the DSP's SMMU cannot map the weights of a context (QNN error 1002), which devices do up to some hundred MB",
        f"{_SPLIT} (executorch #18862)",
    ),
    KnownTrouble(
        r"Skel failed to process context binary",
        Party.RUNTIME,
        "the skel on the DSP does not read the context binary; its size is not the reason",
        f"{_ONE_SDK}, not older than the QNN that compiled the program (executorch #9084)",
    ),
    KnownTrouble(
        r"Context create from binary failed .{1,80}err 1002",
        Party.PROGRAM,
        "the DSP does not get the memory for a context (QNN error 1002)",
        "look at the lines above it in the log; end what else uses the DSP, or divide the program into more contexts",
    ),
    KnownTrouble(
        r"Failed to interpret QNN context binary\. Error code 30010",
        Party.PROGRAM,
        "the program has no context binary for this runtime (30010)",
        "compile it for this backend and with the QNN of the runtime (executorch #6820)",
    ),
)
"""Causes come before their consequences: the first match decides."""
