//! The program that this binary is, which the name with which it was called decides.

use std::{ffi::OsStr, path::Path};

use super::tree;
use crate::{config::VersionFormat, version};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Program {
    ProxyCtl,
    /// The program replaces kube-proxy. Its flags and its version are those of kube-proxy.
    KubeProxy,
}

impl Program {
    /// Returns the program for argv[0], which may be a path or a link.
    pub(super) fn of(called: Option<&OsStr>) -> Self {
        let name = called.and_then(|called| Path::new(called).file_name());
        if name == Some(OsStr::new("kube-proxy")) { Self::KubeProxy } else { Self::ProxyCtl }
    }

    pub(super) fn command(self) -> clap::Command {
        match self {
            Self::ProxyCtl => tree::run(),
            Self::KubeProxy => tree::kube_proxy(),
        }
    }

    /// Returns the version. As kube-proxy it is a semantic version, with ours as the build metadata
    /// after `+`.
    pub(super) fn version(self, format: VersionFormat) -> String {
        match (self, format) {
            (Self::ProxyCtl, _) => format!("proxy-ctl {}\n", version::long()),
            (Self::KubeProxy, VersionFormat::Short) => format!("Kubernetes {}\n", version::reported()),
            (Self::KubeProxy, VersionFormat::Long) => {
                let mut numbers = version::KUBE_PROXY.split('.');
                let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
                let (reported, platform) = (version::reported(), version::platform());
                format!(
                    "version.Info{{Major:{major:?}, Minor:{minor:?}, GitVersion:{reported:?}, GitCommit:{:?}, \
                     BuildDate:{:?}, Compiler:\"rustc\", \
                     Platform:{platform:?}}}\n",
                    version::commit(),
                    version::commit_date()
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("kube-proxy", Program::KubeProxy)]
    #[case("/usr/local/bin/kube-proxy", Program::KubeProxy)]
    #[case("./kube-proxy", Program::KubeProxy)]
    #[case("proxy-ctl", Program::ProxyCtl)]
    #[case("/opt/kube-proxy/proxy-ctl", Program::ProxyCtl)]
    #[case("", Program::ProxyCtl)]
    fn called_as(#[case] called: &str, #[case] program: Program) {
        assert_eq!(Program::of(Some(OsStr::new(called))), program);
    }

    #[test]
    fn the_version_has_the_form_of_kube_proxy() {
        let text = Program::KubeProxy.version(VersionFormat::Short);
        assert!(text.starts_with("Kubernetes v1.36.1+proxy-ctl."), "{text}");
        assert_eq!(text.lines().count(), 1);
        assert!(Program::KubeProxy.version(VersionFormat::Long).contains("Major:\"1\", Minor:\"36\""));
    }
}
