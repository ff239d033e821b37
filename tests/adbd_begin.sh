# shellcheck shell=sh
# First process of a device, in namespaces of its own for network, mounts, processes, IPC and the host name: makes the
# device's root folder, and becomes its init without any capability. $1: root folder of adbd_device.py, $2: the
# device's files, $3: command of init for the device's shell. Mounts disappear with the last process.
set -eu
image=$1 files=$2 init=$3
chroot=$(command -v chroot)
"$image/usr/bin/busybox" ifconfig lo up
mount --make-rprivate /
mount --bind "$image" "$image"
mount -o remount,bind,ro,nosuid,nodev "$image"
for folder in data product sdcard system sys; do
    mount --bind "$files/$folder" "$image/$folder"
    mount -o remount,bind,nosuid,nodev "$image/$folder"
done
mount --bind "$image/tools" "$image/system/bin"
mount -t tmpfs -o mode=1777,nosuid,nodev tmp "$image/tmp"
mount -t tmpfs -o mode=755,nosuid dev "$image/dev"
for name in null zero full random urandom tty; do
    : >"$image/dev/$name"
    mount --bind "/dev/$name" "$image/dev/$name"
done
mkdir "$image/dev/pts" "$image/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$image/dev/pts"
mount -t tmpfs -o mode=1777,nosuid,nodev shm "$image/dev/shm"
ln -s pts/ptmx "$image/dev/ptmx"
ln -s /proc/self/fd "$image/dev/fd"
for number in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${number%:*}" "$image/dev/${number#*:}"; done
mount -t proc -o nosuid,nodev,noexec proc "$image/proc"
# A copy on another file system, which df shows separately from /data.
cp "$files/proc/sys/kernel/random/boot_id" "$image/dev/.boot_id"
mount --bind "$image/dev/.boot_id" "$image/proc/sys/kernel/random/boot_id"
echo localhost >/proc/sys/kernel/hostname
cd /
unset OLDPWD
umask 0
PATH=/product/bin:/system/bin
export PATH
exec "$chroot" --userspec=2000:2000 "$image" /system/bin/sh -c "$init" init
