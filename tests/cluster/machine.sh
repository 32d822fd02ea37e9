# Holds the namespaces of one machine: sh machine.sh NAME, inside `unshare --mount --net --uts`.
# The test keeps the other end of standard input; when that closes, for whatever reason, all that runs here ends.
hostname "$1"
ip link set lo up
echo ready
read -r _
own=$(readlink /proc/$$/ns/net | tr "[]" "??")  # net:[4026532177], as a pattern
while :; do
  left=
  for entry in $(find /proc -mindepth 3 -maxdepth 3 -path '/proc/[0-9]*/ns/net' -lname "$own" 2>/dev/null); do
    pid=${entry#/proc/}
    pid=${pid%%/*}
    [ "$pid" = $$ ] || ! kill -KILL "$pid" 2>/dev/null || left=yes
  done
  [ "$left" ] || exit 0
done
