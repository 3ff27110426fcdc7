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

/// What building and testing needs.
pub(super) const TOOLS: &[Tool] = &[
    Tool {
        program: "ip",
        why: "network namespaces for the lab",
        apt: "iproute2",
        dnf: "iproute",
        pacman: "iproute2",
        optional: false,
    },
    Tool {
        program: "cc",
        why: "linking Rust programs",
        apt: "gcc libc6-dev",
        dnf: "gcc",
        pacman: "gcc",
        optional: false,
    },
    Tool {
        program: "setpriv",
        why: "the API server in tests ends with them",
        apt: "util-linux",
        dnf: "util-linux",
        pacman: "util-linux",
        optional: true,
    },
    Tool {
        program: "bpftool",
        why: "looking at tables, and tests of how they read",
        apt: "bpftool",
        dnf: "bpftool",
        pacman: "bpf",
        optional: true,
    },
    Tool {
        program: "openssl",
        why: "certificates of the API server in tests",
        apt: "openssl",
        dnf: "openssl",
        pacman: "openssl",
        optional: true,
    },
    Tool {
        program: "etcd",
        why: "the API server in tests",
        apt: "etcd-server",
        dnf: "etcd",
        pacman: "etcd",
        optional: true,
    },
    Tool {
        program: "iptables",
        why: "the real kube-proxy as oracle",
        apt: "iptables",
        dnf: "iptables-nft",
        pacman: "iptables",
        optional: true,
    },
    Tool {
        program: "nft",
        why: "the real kube-proxy as oracle",
        apt: "nftables",
        dnf: "nftables",
        pacman: "nftables",
        optional: true,
    },
    Tool {
        program: "conntrack",
        why: "the real kube-proxy as oracle",
        apt: "conntrack",
        dnf: "conntrack-tools",
        pacman: "conntrack-tools",
        optional: true,
    },
];

/// What virtual machines with other kernels need besides.
pub(super) const VIRTUAL_MACHINES: &[Tool] = &[
    Tool {
        program: "qemu-system-x86_64",
        why: "virtual machines with other kernels",
        apt: "qemu-system-x86",
        dnf: "qemu-system-x86-core",
        pacman: "qemu-system-x86",
        optional: false,
    },
    Tool {
        program: "busybox",
        why: "virtual machines with other kernels",
        apt: "busybox-static",
        dnf: "busybox",
        pacman: "busybox",
        optional: false,
    },
    Tool {
        program: "depmod",
        why: "virtual machines with other kernels",
        apt: "kmod",
        dnf: "kmod",
        pacman: "kmod",
        optional: false,
    },
    Tool {
        program: "udevadm",
        why: "virtual machines with other kernels",
        apt: "udev",
        dnf: "systemd-udev",
        pacman: "systemd",
        optional: false,
    },
];

/// What emulating another architecture needs besides.
pub(super) const EMULATION: &[Tool] = &[Tool {
    program: "qemu-system-aarch64",
    why: "arm64, emulated",
    apt: "qemu-system-arm",
    dnf: "qemu-system-aarch64-core",
    pacman: "qemu-system-aarch64",
    optional: false,
}];

/// What running an image needs besides.
pub(super) const CONTAINERS: &[Tool] = &[Tool {
    program: "runc",
    why: "running the image with what the manifests allow it",
    apt: "runc",
    dnf: "runc",
    pacman: "runc",
    optional: false,
}];

/// What installing Python packages needs.
pub(super) const PYTHON: &[Tool] = &[Tool {
    program: "python3",
    why: "programs that come as Python packages",
    apt: "python3 python3-venv",
    dnf: "python3",
    pacman: "python",
    optional: false,
}];
