# shellcheck shell=sh
# $1: seconds since the start of the job, $2: greatest number of bytes. Times are relative to the device's clock.
start=$(date -d "@$(($(date +%s) - $1))" '+%m-%d %H:%M:%S.000' 2>/dev/null)
{ [ -n "$start" ] && logcat -d -v threadtime -t "$start" 2>/dev/null || logcat -d -v threadtime -t 3000 2>/dev/null; } |
    tail -c "$2"
