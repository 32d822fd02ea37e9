# Runs both machines, inside namespaces of their own: sh nfs_machines.sh LAB, with LINUX, MEMORY and what nfs_machine.sh
# needs in the environment. They are joined by one "cable": Ethernet frames in UDP over the namespace's loopback.
lab=$1
here=$(dirname "$0")
ip link set lo up
mount -t tmpfs -o size=8g tmpfs "$lab/memory" # the machines' memory; a file each, as large as what they touch

machine() {
  cable="vec0:transport=l2tpv3,udp=1,src=127.0.0.1,dst=127.0.0.1,srcport=$((4000 + $1)),dstport=$((4001 - $1))"
  TMPDIR=$lab/memory "$LINUX" mem="$MEMORY" rootfstype=hostfs rootflags=/ ro quiet umid="machine$1" uml_dir="$lab/memory/" \
    con=null con0=fd:0,fd:1 ssl=null "$cable,rx_session=1,tx_session=1,depth=64" \
    NODE="$1" LAB="$lab" MODULES="$MODULES" BUSYBOX="$BUSYBOX" OPTIONS="$OPTIONS" \
    init="$BUSYBOX" -- sh "$here/nfs_machine.sh" </dev/null >"$lab/$1.console" 2>&1
  : >"$lab/$1.gone"
}

machine 0 &
machine 1 &
wait
