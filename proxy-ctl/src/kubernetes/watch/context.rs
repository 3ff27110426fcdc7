//! The state that all watchers share.

use std::sync::{Arc, atomic::AtomicBool};

use tokio::sync::mpsc;

use super::state::SourceState;
use crate::{kubernetes::transport::connection::ApiConnection, model::Update};

#[derive(Clone)]
pub(crate) struct WatchContext {
    pub(crate) connection: Arc<ApiConnection>,
    pub(crate) updates: mpsc::Sender<Update>,
    pub(crate) state: SourceState,
    /// True if no streaming list is to be asked for: the configuration says so, or the API server
    /// has refused one.
    pub(crate) plain_lists: Arc<AtomicBool>,
}
