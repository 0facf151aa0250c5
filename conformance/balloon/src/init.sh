#!/bin/busybox sh
# The guest's first process: does what it is told on the first terminal, a line each.
#
#     <- #ready
#     -> 7 echo hello
#     <- hello
#     <- #7 0
#
# The number is the caller's, the last word of the answer the command's exit status.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
# Nothing of the kernel's own words comes here: its console is another.
# Which one this is comes from the command line of the kernel.
exec < /dev/$terminal > /dev/$terminal 2>&1
stty -echo -onlcr
echo "#ready"
# Whoever told it what to do has gone when nothing comes for long.
while read -t 120 -r id line; do
    ( eval "$line" )
    echo "#$id $?"
done
poweroff -f
