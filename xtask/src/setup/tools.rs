//! Programs that distributions package, and how they call the packages.

pub(super) struct Tool {
    /// Tells that it is installed.
    pub(super) program: &'static str,
    pub(super) why: &'static str,
    pub(super) apt: &'static str,
    pub(super) dnf: &'static str,
    pub(super) pacman: &'static str,
    /// Without it a part of the tests is skipped, which then says so.
    pub(super) optional: bool,
}

/// Program, its packages for apt, dnf and pacman, and what for.
const fn needed(program: &'static str, [apt, dnf, pacman]: [&'static str; 3], why: &'static str) -> Tool {
    Tool { program, why, apt, dnf, pacman, optional: false }
}

const fn optional(program: &'static str, packages: [&'static str; 3], why: &'static str) -> Tool {
    Tool { optional: true, ..needed(program, packages, why) }
}

/// What building and testing needs.
pub(super) const TOOLS: &[Tool] = &[
    needed("ip", ["iproute2", "iproute", "iproute2"], "network namespaces for the lab"),
    needed("cc", ["gcc libc6-dev", "gcc", "gcc"], "linking Rust programs"),
    needed("make", ["make", "make", "make"], "building the memory allocator"),
    needed("ethtool", ["ethtool", "ethtool", "ethtool"], "network cards of the lab that run XDP programs"),
    optional("setpriv", ["util-linux", "util-linux", "util-linux"], "the API server in tests ends with them"),
    optional("bpftool", ["bpftool", "bpftool", "bpf"], "looking at tables, and tests of how they read"),
    optional("openssl", ["openssl", "openssl", "openssl"], "certificates of the API server in tests"),
    optional("etcd", ["etcd-server", "etcd", "etcd"], "the API server in tests"),
    optional("iptables", ["iptables", "iptables-nft", "iptables"], "the real kube-proxy as oracle"),
    optional("nft", ["nftables", "nftables", "nftables"], "the real kube-proxy as oracle"),
    optional(
        "conntrack",
        ["conntrack", "conntrack-tools", "conntrack-tools"],
        "the real kube-proxy as oracle",
    ),
];

/// What virtual machines with other kernels need besides.
pub(super) const VIRTUAL_MACHINES: &[Tool] = &[
    needed(
        "qemu-system-x86_64",
        ["qemu-system-x86", "qemu-system-x86-core", "qemu-system-x86"],
        "virtual machines with other kernels",
    ),
    needed("busybox", ["busybox-static", "busybox", "busybox"], "virtual machines with other kernels"),
    needed("depmod", ["kmod", "kmod", "kmod"], "virtual machines with other kernels"),
    needed("udevadm", ["udev", "systemd-udev", "systemd"], "virtual machines with other kernels"),
];

/// What emulating another architecture needs besides.
pub(super) const EMULATION: &[Tool] = &[needed(
    "qemu-system-aarch64",
    ["qemu-system-arm", "qemu-system-aarch64-core", "qemu-system-aarch64"],
    "arm64, emulated",
)];

/// What running an image needs besides.
pub(super) const CONTAINERS: &[Tool] =
    &[needed("runc", ["runc", "runc", "runc"], "running the image with what the manifests allow it")];

/// What fuzzing needs besides.
pub(super) const FUZZING: &[Tool] = &[needed("c++", ["g++", "gcc-c++", "gcc"], "compiling libFuzzer")];

/// What installing Python packages needs.
pub(super) const PYTHON: &[Tool] = &[needed(
    "python3",
    ["python3 python3-venv", "python3", "python"],
    "programs that come as Python packages",
)];
