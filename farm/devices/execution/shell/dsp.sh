# shellcheck shell=sh
# $1: seconds since the start of the job, $2: greatest number of bytes. Prints only lines of the DSP and of FastRPC, so
# that other lines do not use up $2. Times are relative to the device's clock.
start=$(date -d "@$(($(date +%s) - $1))" '+%m-%d %H:%M:%S.000' 2>/dev/null)
{
    [ -n "$start" ] && logcat -d -v threadtime -t "$start" 2>/dev/null || logcat -d -v threadtime -t 3000 2>/dev/null ||
        journalctl -n 3000 --no-pager --since "-$1 seconds" 2>/dev/null
} | grep -a -i -E 'adsprpc|cdsprpc|fastrpc|FARF|QnnDsp|\[Qnn |remoteproc|smmu' | tail -c "$2"
