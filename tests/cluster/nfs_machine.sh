# Start-up of one of the two machines, run as process 1 by busybox on the user-mode kernel. The kernel's command line sets
# NODE (0 serves, 1 does not), LAB (folder on the real machine), MODULES, BUSYBOX and OPTIONS (of the NFS mount).
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
export FIRST=10.98.0.1 ADDRESS=10.98.0.$((NODE + 1)) IF=vec0 SHARED=/mnt/share OUT=/run/out TMPDIR=/run/tmp
b=$BUSYBOX

# The root file system is the real machine's, read-only; what must be writable lies in memory.
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
for folder in /run /mnt /srv; do $b mount -t tmpfs tmpfs $folder; done
$b mkdir -p $OUT $TMPDIR $SHARED /dev/shm
$b mount -t tmpfs tmpfs /dev/shm
$b mount -t hostfs none $OUT -o "$LAB"
exec >"$OUT/$NODE.boot" 2>&1
set -x

load() { # a kernel module after those it needs; the list in modules.dep ends with the deepest
  local order= name line
  line=$($b grep "/$1.ko:" "$MODULES/modules.dep")
  for name in ${line#*:}; do order="$name $order"; done
  for name in $order "${line%%:*}"; do $b insmod "$MODULES/$name"; done 2>/dev/null
}

serve() { # The kernel's NFS server without its daemons: what they would answer is written into its caches beforehand.
  local never=2147483647 address
  # insecure port, gathered writes, no subtree check, fsid: fs/nfsd, NFSEXP_* = 0x2 + 0x20 + 0x400 + 0x2000
  local flags=9250 nobody=65534 fsid=0
  load nfsd
  $b mkdir /srv/share /srv/clients
  $b mount -t tmpfs -o size=64m tmpfs /srv/share
  $b chmod 1777 /srv/share
  $b mount -t nfsd nfsd /proc/fs/nfsd
  for address in 127.0.0.1 10.98.0.1 10.98.0.2; do
    echo "nfsd $address $never *" >/proc/net/rpc/auth.unix.ip/channel
  done
  echo "* /srv/share $never $flags $nobody $nobody $fsid" >/proc/net/rpc/nfsd.export/channel
  echo "* 1 \\x00000000 $never /srv/share" >/proc/net/rpc/nfsd.fh/channel
  echo /srv/clients >/proc/fs/nfsd/nfsv4recoverydir # without it grace cannot be ended: 13 s before the first write
  echo 10 >/proc/fs/nfsd/nfsv4leasetime
  echo 10 >/proc/fs/nfsd/nfsv4gracetime
  echo "-3 +4 +4.1 +4.2" >/proc/fs/nfsd/versions
  echo "tcp 2049" >/proc/fs/nfsd/portlist
  echo 4 >/proc/fs/nfsd/threads
  echo Y >/proc/fs/nfsd/v4_end_grace # nobody can have locks from before
}

join_share() { # node 0 mounts its own export over loopback, so that both are clients
  local server=$FIRST try
  [ "$NODE" = 1 ] || server=127.0.0.1
  for try in $($b seq 100); do
    $b mount -t nfs4 -o "$OPTIONS,addr=$server,clientaddr=$ADDRESS" $server:/ $SHARED && return
    $b sleep 0.1
  done
}

$b hostname "node$NODE" # the NFS client's identity derives from it
$b ip link set lo up
$b ip address add $ADDRESS/24 dev $IF
$b ip link set $IF up
load nfsv4
load sch_netem # for `tc qdisc add dev $IF root netem ...` in jobs
[ "$NODE" = 1 ] || serve
join_share
$b cat /proc/uptime
cd $SHARED && NODE=$NODE /bin/sh "$LAB/job.sh" >"$OUT/$NODE.output" 2>&1
status=$?
cd /
[ "$NODE" = 0 ] || $b umount $SHARED || $b umount -l $SHARED
echo $status >"$OUT/$NODE.status.new"
$b mv "$OUT/$NODE.status.new" "$OUT/$NODE.status"
while [ "$NODE" = 0 ] && [ ! -e $OUT/1.gone ]; do $b sleep 0.05; done # it may still need the server
$b poweroff -f
