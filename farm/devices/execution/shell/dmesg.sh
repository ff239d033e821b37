# shellcheck shell=sh
# $1: seconds since the start of the job, $2: greatest number of bytes. Times are relative to the device's clock.
dmesg 2>/dev/null | tail -n 1000 | tail -c "$2"
