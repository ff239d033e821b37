# shellcheck shell=sh
# $1: seconds since it began, $2: greatest number of bytes. Times are the device's own, whatever its clock says.
journalctl -k -n 1000 --no-pager --since "-$1 seconds" 2>/dev/null | tail -c "$2"
