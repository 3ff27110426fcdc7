//! The version of kube-proxy that this program replaces, and the version that it reports itself.

use std::sync::LazyLock;

use jiff::Timestamp;

/// The Kubernetes release whose kube-proxy this program follows.
pub const KUBE_PROXY: &str = "1.36.1";

const OWN: &str = env!("CARGO_PKG_VERSION");

const UNKNOWN: &str = "unknown";

/// Returns the hash of the commit, or `unknown` for a build for tests or outside of a repository.
pub fn commit() -> &'static str {
    let commit = env!("PROXY_CTL_COMMIT");
    if commit.is_empty() { UNKNOWN } else { commit }
}

/// Returns when the commit was made, as RFC 3339 in UTC, or `unknown`. The date of the build is not
/// used, so that a build can be repeated bit by bit.
pub fn commit_date() -> &'static str {
    static DATE: LazyLock<String> = LazyLock::new(|| date_of(env!("PROXY_CTL_COMMIT_TIME")));
    &DATE
}

fn date_of(seconds: &str) -> String {
    let time = seconds.parse().ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    time.map_or_else(|| UNKNOWN.to_owned(), |time| time.to_string())
}

/// Returns the text of `--version`.
pub fn long() -> &'static str {
    static LONG: LazyLock<String> = LazyLock::new(|| {
        format!(
            "{OWN}\ncommit: {}\ncommit date: {}\nBPF object: {}",
            commit(),
            commit_date(),
            env!("PROXY_EBPF_BUILT_WITH")
        )
    });
    &LONG
}

/// Returns the version for tools and dashboards, which compare it with the versions of other
/// components. An example is `v1.36.1+proxy-ctl.0.1.0`.
pub fn reported() -> String {
    format!("v{KUBE_PROXY}+proxy-ctl.{OWN}")
}

/// Returns system and architecture by their names in Go, such as `linux/amd64`.
pub fn platform() -> String {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("{}/{architecture}", std::env::consts::OS)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::of_a_commit("1796038675", "2026-11-30T11:37:55Z")]
    #[case::not_known("", "unknown")]
    fn the_date_of_a_commit(#[case] seconds: &str, #[case] expected: &str) {
        assert_eq!(date_of(seconds), expected);
    }
}
