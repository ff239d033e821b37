# shellcheck shell=sh
# $1: seconds since it began, $2: greatest number of bytes. What the DSP logs comes with the logs of the program that it
# works for (FastRPC), and is not pushed out here by what others log. Times are the device's own.
start=$(date -d "@$(($(date +%s) - $1))" '+%m-%d %H:%M:%S.000' 2>/dev/null)
{
    [ -n "$start" ] && logcat -d -v threadtime -t "$start" 2>/dev/null || logcat -d -v threadtime -t 3000 2>/dev/null ||
        journalctl -n 3000 --no-pager --since "-$1 seconds" 2>/dev/null
} | grep -a -i -E 'adsprpc|cdsprpc|fastrpc|FARF|QnnDsp|\[Qnn |remoteproc|smmu' | tail -c "$2"
