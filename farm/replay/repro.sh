#!/bin/sh
@about@
#
# usage: repro.sh [SERIAL]        ADB=path/to/adb if adb is not on PATH
#
# Exit code: the runner's (docs/reference/native_runner.md of farm); 1 if the runner's is 0 and an output is missing or
# has another size; 125 for a failure of adb or the device. A difference from the past result is printed, and is no
# failure.

set -u
soc=@soc@
machine=@machine@
root=@root@
su=

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 125
serial=${1-}
workspace=/data/local/tmp/farm-repro-$(date +%s)-$$

adb() {
    if [ -n "$serial" ]; then
        command "${ADB:-adb}" -s "$serial" "$@" </dev/null
    else
        command "${ADB:-adb}" "$@" </dev/null
    fi
}

# Run commands without single quotes in a shell of the device, as root if necessary.
run() {
    if [ -n "$su" ]; then
        # umask: adb's user must be able to read and remove files of root.
        adb shell "$su 'umask 0; $1'"
    else
        adb shell "$1"
    fi
}

fail() {
    echo "repro.sh: $1" >&2
    exit 125
}

# shellcheck disable=SC2329 # by a trap
clean_up() {
    # End a running runner by SIGTERM: a runner with child processes then ends them.
    run "cd $workspace/device && [ ! -f exit_code ] && [ -f pid ] && pid=\$(cat pid) && kill \$pid && \
for n in 1 2 3 4 5 6 7 8 9; do kill -0 \$pid || exit 0; sleep 0.2; done; kill -9 \$pid" >/dev/null 2>&1
    run "rm -rf $workspace" >/dev/null 2>&1
}

# Check that an output exists, has the expected size, and equals the past output.
check() {
    file=$here/outputs/$1
    then=$here/outputs_then/$1
    if [ ! -f "$file" ]; then
        echo "$1: missing"
        wrong=1
        return
    fi
    size=$(wc -c <"$file" | tr -d ' ')
    if [ "$size" != "$2" ]; then
        echo "$1: $size bytes, expected $2"
        wrong=1
    elif [ ! -f "$then" ]; then
        echo "$1: $size bytes; the past output was not kept, so that there is no comparison"
    elif cmp -s "$file" "$then"; then
        echo "$1: $size bytes, the same as then"
    else
        echo "$1: $size bytes, of which $(cmp -l "$file" "$then" | wc -l | tr -d ' ') differ from then"
    fi
}

adb get-state >/dev/null || fail "no device${serial:+ $serial}: attach one, or name one of 'adb devices'"
found=$(adb shell uname -m | tr -d '\r\n')
case $machine:$found in
    x86_64:x86_64 | aarch64:aarch64 | aarch64:armv8*) ;;
    *) fail "the files are for $machine, the device has $found" ;;
esac
found=$(adb shell getprop ro.soc.model | tr -d '\r\n')
if [ -n "$found" ] && [ "$found" != "$soc" ]; then
    fail "the program is for $soc, the device is a $found"
fi
if [ "$root" = 1 ]; then
    adb root >/dev/null 2>&1
    adb wait-for-device
    # Syntax of su in AOSP, then in Magisk; the first that gives root is used.
    for su in "" "su 0 sh -c" "su -c" none; do
        [ "$su" != none ] || fail "root is needed, and neither adb root nor su gives it: use a userdebug or eng build \
of the system, or allow its su for adb's shell"
        [ "$(run "id -u" 2>/dev/null | tr -d '\r\n')" != 0 ] || break
    done
fi

trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

adb shell "mkdir -p $workspace" || fail "cannot make $workspace on the device"
adb push "$here/device" "$workspace/" >/dev/null || fail "cannot push the files"
run "sh $workspace/device/run.sh"
code=$(adb shell "cat $workspace/device/exit_code" | tr -d '\r\n')
case $code in
    '' | *[!0-9]*) fail "the device does not tell how the runner ended" ;;
esac
rm -rf "$here/outputs"
adb pull "$workspace/device/outputs" "$here" >/dev/null || fail "cannot pull the outputs"

echo "exit code $code"
if [ "$code" != 0 ]; then
    exit "$code"
fi
# The runner of direct mode writes no such file.
if [ -f "$here/outputs/inference_speed.txt" ]; then
    echo "mean latency $(cat "$here/outputs/inference_speed.txt") ms"
fi
if [ -f "$here/outputs/tokens.txt" ]; then
    echo "tokens, by prompt, in $here/outputs/tokens.txt"
fi
wrong=0
@checks@
exit "$wrong"
