//! Connections to the API server: its address and credentials, the HTTP client, and the limit and
//! metrics of requests.

pub(super) mod connection;
mod dial;
pub(super) mod kubeconfig;
mod plugin;
pub(super) mod proxy_variables;
mod rate_limit;
pub(super) mod requests;
pub(super) mod secrets;
pub(super) mod token_file;
