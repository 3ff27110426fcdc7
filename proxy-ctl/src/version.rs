//! Which kube-proxy this program takes the place of, and what it calls itself.

/// The Kubernetes release whose kube-proxy is followed.
pub const KUBE_PROXY: &str = "1.36.1";

const OWN: &str = env!("CARGO_PKG_VERSION");

/// Such as `v1.36.1+proxy-ctl.0.1.0`: tools and dashboards compare it with the versions of other components.
pub fn reported() -> String {
    format!("v{KUBE_PROXY}+proxy-ctl.{OWN}")
}

/// System and architecture by their names in Go, such as `linux/amd64`.
pub fn platform() -> String {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("{}/{architecture}", std::env::consts::OS)
}
