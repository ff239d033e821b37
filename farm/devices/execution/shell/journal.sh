# shellcheck shell=sh
# $1: seconds since the start of the job, $2: greatest number of bytes. Times are relative to the device's clock.
journalctl -k -n 1000 --no-pager --since "-$1 seconds" 2>/dev/null | tail -c "$2"
