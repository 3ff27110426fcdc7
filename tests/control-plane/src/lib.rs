//! A real control plane on this machine: etcd and kube-apiserver. It starts within a few seconds,
//! on loopback or in a network namespace, and ends with the value that holds it. It is for tests of
//! the Kubernetes source, the demo, the benchmarks, and the real kube-proxy as an oracle.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! let server = control_plane::ApiServer::start(std::path::Path::new("/tmp/control-plane"))?;
//! server.apply(&serde_json::json!({
//!     "apiVersion": "v1", "kind": "Service",
//!     "metadata": {"namespace": "default", "name": "web"},
//!     "spec": {"ports": [{"port": 80}]},
//! }))?;
//! println!("proxy-ctl run --kubeconfig {}", server.kubeconfig(control_plane::PROXY).display());
//! # Ok(())
//! # }
//! ```

mod api_server;
pub mod binaries;
mod certificates;
pub mod go;
pub mod objects;
mod process;
mod relay;

pub use api_server::{ADMIN, ApiServer, Identity, Options, PROXY};
pub use process::Process;
pub use relay::Relay;
