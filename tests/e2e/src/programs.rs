//! Programs of a cluster and of its tests. They are built once from the Go module beside this
//! crate, and kept in the cache.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use control_plane::{
    binaries::{self, linker_flags},
    go::Module,
};

const KUBERNETES: &str = "k8s.io/kubernetes";
/// Test binary, and the folder of the module whose tests it has.
const TESTS: (&str, &str) = ("e2e.test", ".");

/// Program that is built from the module.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Program {
    Kubelet,
    Kubectl,
    Scheduler,
    ControllerManager,
    /// Serves and dials in the pods of the tests.
    Agnhost,
    /// Serves in the test for conntrack's invalid packets.
    Regression74839,
    /// Runs the tests in several processes.
    Ginkgo,
    /// Contains the tests of sig-network.
    Tests,
    /// Answers names of Services and pods.
    Dns,
    /// Gives addresses to Services of type LoadBalancer.
    LoadBalancers,
    /// Runs as the first process of each pod.
    Pause,
}

impl Program {
    const ALL: [Self; 11] = [
        Self::Kubelet,
        Self::Kubectl,
        Self::Scheduler,
        Self::ControllerManager,
        Self::Agnhost,
        Self::Regression74839,
        Self::Ginkgo,
        Self::Tests,
        Self::Dns,
        Self::LoadBalancers,
        Self::Pause,
    ];

    const fn package(self) -> &'static str {
        match self {
            Self::Kubelet => "k8s.io/kubernetes/cmd/kubelet",
            Self::Kubectl => "k8s.io/kubernetes/cmd/kubectl",
            Self::Scheduler => "k8s.io/kubernetes/cmd/kube-scheduler",
            Self::ControllerManager => "k8s.io/kubernetes/cmd/kube-controller-manager",
            Self::Agnhost => "k8s.io/kubernetes/test/images/agnhost",
            Self::Regression74839 => "k8s.io/kubernetes/test/images/regression-issue-74839",
            Self::Ginkgo => "github.com/onsi/ginkgo/v2/ginkgo",
            Self::Tests => TESTS.1,
            Self::Dns => "./cmd/dns",
            Self::LoadBalancers => "./cmd/lb",
            Self::Pause => "./cmd/pause",
        }
    }

    /// Returns the name of the program's file.
    pub fn name(self) -> &'static str {
        if self == Self::Tests { TESTS.0 } else { self.package().rsplit('/').next().unwrap_or_default() }
    }

    /// Returns true if the program's sources are in this repository.
    const fn is_ours(self) -> bool {
        matches!(self, Self::Tests | Self::Dns | Self::LoadBalancers | Self::Pause)
    }

    fn module(self) -> Module {
        if self.is_ours() { own_module() } else { module() }
    }

    /// Returns the program if it was built before.
    pub fn built(self) -> Option<PathBuf> {
        self.module().built(self.name())
    }

    pub fn path(self) -> Result<PathBuf> {
        self.built().with_context(|| format!("{} is not built", self.name()))
    }
}

/// Returns the name of the first program that was not built yet.
pub fn missing() -> Option<&'static str> {
    Program::ALL.into_iter().find(|program| program.built().is_none()).map(Program::name)
}

/// Builds what is missing, in about nine minutes of two processors.
pub fn build() -> Result<()> {
    let flags = linker_flags(&kubernetes_version()?);
    let packages = |ours: bool| -> Vec<&str> {
        let all = Program::ALL.into_iter().filter(|program| program.is_ours() == ours);
        all.filter(|program| *program != Program::Tests).map(Program::package).collect()
    };
    module().with_linker_flags(&flags).build(&packages(false))?;
    let own = own_module().with_linker_flags(&flags);
    own.build(&packages(true))?;
    own.build_tests(None, Program::Tests.package(), Program::Tests.name())
}

/// Returns the version of Kubernetes of which the programs and the tests are.
pub fn kubernetes_version() -> Result<String> {
    module().required(KUBERNETES)
}

/// Returns the folder with the sources of Kubernetes, which are downloaded if necessary.
pub fn kubernetes_sources() -> Result<PathBuf> {
    module().sources(KUBERNETES)
}

/// Programs from `tests/kubernetes` that the control plane and the reference need.
const REFERENCE: [binaries::Program; 3] =
    [binaries::Program::Etcd, binaries::Program::KubeApiServer, binaries::Program::KubeProxy];

/// Returns true if nothing has to be built of what other suites use too.
pub fn reference_is_built() -> bool {
    REFERENCE.iter().all(|program| program.installed().is_some())
}

/// Builds what other suites use too. Returns the reason if it cannot be built because there is no
/// Go.
pub fn provide_reference() -> Result<Option<String>> {
    binaries::provide(&REFERENCE)
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("go")
}

fn module() -> Module {
    Module::new(folder(), "e2e")
}

/// Returns the same module with another cache folder, for programs whose sources are in this
/// repository. So a change of these does not build all of Kubernetes again.
fn own_module() -> Module {
    Module::new(folder(), "e2e-own").with_sources(&[
        "e2e_test.go",
        "cmd/dns/main.go",
        "cmd/dns/names.go",
        "cmd/lb/main.go",
        "cmd/pause/main.go",
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_programs_are_of_the_kubernetes_that_the_other_suites_run() {
        assert_eq!(kubernetes_version().unwrap(), binaries::module().required(KUBERNETES).unwrap());
    }

    #[test]
    fn names_are_those_that_go_gives() {
        let names = Program::ALL.map(Program::name);
        assert!(names.contains(&"kubelet") && names.contains(&"lb") && names.contains(&"e2e.test"));
    }
}
