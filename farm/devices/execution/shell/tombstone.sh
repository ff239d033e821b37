# shellcheck shell=sh
# $1: seconds since the start of the job, $2: greatest number of bytes. Times are relative to the device's clock.
cd /data/tombstones 2>/dev/null || exit 0
newest=$(find . -maxdepth 1 -type f -name 'tombstone_*' ! -name '*.pb' -mmin "-$(($1 / 60 + 1))" \
    -exec ls -t {} + 2>/dev/null | head -n 1)
if [ -n "$newest" ]; then head -c "$2" -- "$newest"; fi
