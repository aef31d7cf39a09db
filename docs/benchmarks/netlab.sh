#!/usr/bin/env bash
# Hosts on one Linux machine: network namespaces on a bridge, the uplink and the downlink of each limited by tc's tbf.
# Needs root and iproute2. Makes only interfaces and namespaces called gwlab*, and removes them whatever happens.
#
#   ./netlab.sh HOSTS RATE COMMAND...     RATE as tc writes it, e.g. 100mbit; 0 for no limit
#
# Every host runs COMMAND with the variables that torchrun would set, Gloo bound to the limited link.
set -euo pipefail

if (( $# < 3 )); then
  echo "usage: $0 HOSTS RATE COMMAND..., for example: $0 4 100mbit python step_time.py" >&2
  exit 2
fi
if (( EUID != 0 )) || ! command -v ip >/dev/null || ! command -v tc >/dev/null; then
  echo "$0 needs root, ip and tc (iproute2)" >&2
  exit 2
fi
hosts=$1 rate=$2
shift 2

clean() {
  jobs -p | xargs -r kill 2>/dev/null || true
  for name in $(ip netns list | awk '/^gwlab[0-9]+/ {print $1}'); do ip netns del "$name"; done
  for name in /sys/class/net/gwlab-*; do ip link del "${name##*/}" 2>/dev/null || true; done
}

limit() {  # namespace or "", interface
  [[ $rate == 0 ]] && return
  ${1:+ip netns exec "$1"} tc qdisc add dev "$2" root tbf rate "$rate" burst 256k latency 200ms
}

trap clean EXIT
clean
ip link add gwlab-br type bridge
ip link set gwlab-br up
for (( host = 0; host < hosts; host++ )); do
  ip netns add "gwlab$host"
  ip link add "gwlab-v$host" type veth peer name wire netns "gwlab$host"
  ip link set "gwlab-v$host" master gwlab-br up
  ip -n "gwlab$host" addr add "10.99.0.$(( host + 1 ))/24" dev wire
  ip -n "gwlab$host" link set wire up
  ip -n "gwlab$host" link set lo up
  limit "gwlab$host" wire
  limit "" "gwlab-v$host"
done

export TORCH_CPP_LOG_LEVEL=ERROR # it would warn that addresses have no names
export WORLD_SIZE=$hosts LOCAL_RANK=0 MASTER_ADDR=10.99.0.1 MASTER_PORT=29400 GLOO_SOCKET_IFNAME=wire
ranks=()
for (( host = 0; host < hosts; host++ )); do
  RANK=$host ip netns exec "gwlab$host" "$@" &
  ranks+=($!)
done
status=0
for rank in "${ranks[@]}"; do wait "$rank" || status=$?; done
exit "$status"
