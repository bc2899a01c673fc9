#!/usr/bin/env bash
# Several nodes: probe on one prefill host, copy its launch config to all hosts, start the systemd units, then a router.
#
#   MODEL_PATH=/models/m PREFILL_HOSTS="p0 p1" DECODE_HOSTS="d0 d1 d2" ROUTER_HOST=r0 examples/several_nodes.sh
#
# Every host has the model under the same path, the units of examples/systemd/ and /etc/spectrumkv/spectrumkv.env, with
# HOST set to its own address; the script sets ROUTER_SERVERS on the router's host. SSH logs in as root.
# With CONTROL_SECRET=FILE (openssl rand -hex 32 > FILE) every server gets it as its control_secret_file.
set -euo pipefail

: "${MODEL_PATH:?directory of the model, on every host}"
: "${PREFILL_HOSTS:?names of the prefill hosts}"
: "${DECODE_HOSTS:?names of the decode hosts}"
: "${ROUTER_HOST:?name of the host of the router}"
PROBE_FLAGS=${PROBE_FLAGS:---tp 1 --dtype bfloat16}
CONFIG=/var/lib/spectrumkv/launch.yaml
BIN=/opt/spectrumkv/bin

read -ra prefill <<<"$PREFILL_HOSTS"
read -ra decode <<<"$DECODE_HOSTS"
copy=$(mktemp)
trap 'rm -f "$copy"' EXIT

echo "probing on ${prefill[0]}, unless its launch config answers for this very model"
ssh "root@${prefill[0]}" "install -d -o sglang /var/lib/spectrumkv && runuser -u sglang -- $BIN/python -m spectrumkv_sglang.launch.probe_then_launch --probe-only --model-path $MODEL_PATH --out $CONFIG -- $PROBE_FLAGS"
scp -q "root@${prefill[0]}:$CONFIG" "$copy"

secret=/etc/spectrumkv/control.secret
if [[ -n ${CONTROL_SECRET:-} ]]; then
    for host in "${prefill[@]}" "${decode[@]}"; do
        scp -q "$CONTROL_SECRET" "root@$host:$secret.new"
        ssh "root@$host" "chown sglang: $secret.new && chmod 600 $secret.new && mv $secret.new $secret && sed -i '/SPECTRUMKV_CONTROL_SECRET_FILE=/d' /etc/spectrumkv/spectrumkv.env && echo SPECTRUMKV_CONTROL_SECRET_FILE=$secret >> /etc/spectrumkv/spectrumkv.env"
    done
fi

servers=""
for host in "${prefill[@]}" "${decode[@]}"; do
    # One launch config for all: a decode server refuses a tier that its own config forbids.
    scp -q "$copy" "root@$host:$CONFIG.new"
    ssh "root@$host" "chown sglang: $CONFIG.new && mv $CONFIG.new $CONFIG"
done
for host in "${prefill[@]}"; do
    ssh "root@$host" "$BIN/spectrumkv launch prefill --config $CONFIG --dry-run && systemctl restart spectrumkv-prefill"
    servers+=" --prefill http://$host:30000 8998"
done
for host in "${decode[@]}"; do
    ssh "root@$host" "$BIN/spectrumkv launch decode --config $CONFIG --dry-run && systemctl restart spectrumkv-decode"
    servers+=" --decode http://$host:31000"
done

echo "on $ROUTER_HOST, in /etc/spectrumkv/spectrumkv.env: ROUTER_SERVERS=${servers# }"
ssh "root@$ROUTER_HOST" "sed -i 's|^ROUTER_SERVERS=.*|ROUTER_SERVERS=${servers# }|' /etc/spectrumkv/spectrumkv.env && systemctl restart spectrumkv-router"
