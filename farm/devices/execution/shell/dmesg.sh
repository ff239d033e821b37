# shellcheck shell=sh
# $1: seconds since it began, $2: greatest number of bytes. Times are the device's own, whatever its clock says.
dmesg 2>/dev/null | tail -n 1000 | tail -c "$2"
