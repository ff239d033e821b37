# shellcheck shell=sh
# $1: seconds since it began, $2: greatest number of bytes. Times are the device's own, whatever its clock says.
start=$(date -d "@$(($(date +%s) - $1))" '+%m-%d %H:%M:%S.000' 2>/dev/null)
{ [ -n "$start" ] && logcat -d -v threadtime -t "$start" 2>/dev/null || logcat -d -v threadtime -t 3000 2>/dev/null; } |
    tail -c "$2"
