#!/usr/bin/env bash
# One machine of the cluster. Called with the words below; all but `enter` run inside the machine's namespaces.
#   enter NETNS CGROUP...   become the machine: move into its cgroups, make the namespaces, run `init` as PID 1
#   init                    mounts; then wait, and collect what is re-parented to PID 1
#   start SERVICE CMD...    run a service, its output goes to /var/log/SERVICE.log
#   stop SERVICE SIGNAL     end it and wait until it is gone
#   alive SERVICE           exit code 0 when it runs
# `enter` and `init` take MACHINE, PROGRAMS, STATE, SHARED and CACHE from the environment.
set -euo pipefail
export PATH=/opt/cluster:/usr/sbin:/usr/bin:/sbin:/bin
run=/run/machine

enter() {
    local netns=$1 group; shift
    for group; do echo $$ >"$group/cgroup.procs"; done
    exec ip netns exec "$netns" unshare --mount --pid --uts --ipc --cgroup --fork --kill-child --propagation private bash "$0" init
}

init() {
    mount -t proc proc /proc
    mount --make-rprivate /
    mount_cgroups
    hostname "$MACHINE"
    ip link set lo up
    sysctl -qw net.ipv4.ip_forward=1
    pretend_sysctls

    # Folders that are about to be covered stay reachable as open files.
    exec 6<"$CACHE" 7<"$PROGRAMS" 8<"$STATE" 9<"$SHARED"
    local folder
    mount -t tmpfs -o mode=755 tmpfs /mnt && cp -a /etc/. /mnt/ && mount --move /mnt /etc
    for folder in /run /mnt /opt /srv; do mount -t tmpfs -o mode=755 tmpfs $folder; done
    for folder in /tmp /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $folder; done
    mkdir -p $run/pki /run/lock /run/cni /opt/cni /opt/cluster /mnt/cache /dev/shm/shared
    mount --bind /proc/self/fd/6 /mnt/cache && mount -o remount,bind,ro /mnt/cache
    mount --bind /proc/self/fd/7 /opt/cluster
    mount --bind "/proc/self/fd/8/$MACHINE/log" /var/log
    mount --bind "/proc/self/fd/8/$MACHINE/lib" /var/lib
    mount --bind /proc/self/fd/9 /dev/shm/shared
    exec 6<&- 7<&- 8<&- 9<&-
    mkdir -p /etc/cdi /run/cdi /etc/cni/net.d /var/lib/kubelet /var/log/pods /var/log/containers
    ln -s /usr/lib/cni /opt/cni/bin
    rm -rf /var/lib/cni && ln -s /run/cni /var/lib/cni # the addresses of pods do not outlive the machine
    echo "$MACHINE" | md5sum | cut -c1-32 >/etc/machine-id.new && mv -f /etc/machine-id.new /etc/machine-id
    echo "$MACHINE" >/etc/hostname
    mount --make-rshared / # volumes propagate into pods
    touch $run/ready
    while :; do
        sleep 86400 &
        wait $! || true
    done
}

# The v1 hierarchies, seen from this machine's own cgroup downwards: two kubelets must not tidy up each other's pods.
mount_cgroups() {
    local options folder
    mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
    for options in $(sed -n 's/^[0-9]*:\([^:]\{1,\}\):.*/\1/p' /proc/self/cgroup); do
        folder=/sys/fs/cgroup/${options#name=}
        mkdir "$folder"
        [[ $options != name=* ]] || options=none,$options
        mount -t cgroup -o "$options" cgroup "$folder"
    done
}

# The kubelet insists on these. A file with the wanted value over each leaves the real settings of the kernel alone.
pretend_sysctls() {
    local wanted=$STATE/$MACHINE/sysctl pair file
    mkdir -p "$wanted"
    for pair in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
        kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
        file=/proc/sys/${pair%=*}
        [[ -e $file ]] || continue
        echo "${pair#*=}" >"$wanted/$(basename "$file")"
        mount --bind "$wanted/$(basename "$file")" "$file"
    done
}

# A pid file holds "pid start-time"; the start time tells our process from a later one with the same number.
started() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

pid_of() {
    local pid since
    read -r pid since 2>/dev/null <"$run/$1.pid" && [[ -n $since && $(started "$pid") == "$since" ]] && echo "$pid"
}

start() {
    local service=$1 group; shift
    pid_of "$service" >/dev/null && return
    for group in /sys/fs/cgroup/*/cgroup.procs; do echo $$ >"$group"; done # we come from outside, by way of nsenter
    setsid "$@" >>"/var/log/$service.log" 2>&1 </dev/null &
    echo "$! $(started $!)" >"$run/$service.pid"
}

stop() {
    local pid
    while pid=$(pid_of "$1"); do
        kill "-$2" "$pid" 2>/dev/null || true
        sleep 0.1
    done
    rm -f "$run/$1.pid"
}

case $1 in
enter | start | stop) "$@" ;;
init) init ;;
alive) pid_of "$2" >/dev/null ;;
*) echo "machine.sh: unknown word $1" >&2; exit 2 ;;
esac
