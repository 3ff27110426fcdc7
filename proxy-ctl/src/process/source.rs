//! The source of Services, which is the API server or a folder of manifests.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::settings::Settings;
use crate::{
    config::Config,
    events::Recorder,
    http::report::{Metrics, ModeInForce},
    kubernetes::{Kubernetes, SourceState, convert::invalid::InvalidField},
    manifests::Manifests,
    model::Update,
    modes,
};

pub(super) enum Source {
    Kubernetes(Box<Kubernetes>),
    Manifests(Manifests),
}

impl Source {
    /// Opens the source. It must be called within the runtime.
    pub(super) fn open(settings: &Settings, state: &SourceState) -> anyhow::Result<Self> {
        match &settings.manifests {
            Some(folder) => Ok(Self::Manifests(Manifests::open(folder, Arc::clone(&settings.node_name))?)),
            None => Ok(Self::Kubernetes(Box::new(settings.kubernetes(state.clone())?))),
        }
    }

    /// Returns the recorder of events. It must be called within the runtime.
    pub(super) fn recorder(&self, node_name: &Arc<str>) -> anyhow::Result<Recorder> {
        let Self::Kubernetes(kubernetes) = self else { return Ok(Recorder::silent()) };
        let host = nix::unistd::gethostname().context("asking for the host's name")?;
        Ok(Recorder::new(kubernetes.api(), Arc::clone(node_name), &host.to_string_lossy()))
    }

    /// Returns the address and port at which the API server is dialled, if they are known.
    pub(super) fn server_address(&self) -> Option<SocketAddr> {
        match self {
            Self::Kubernetes(kubernetes) => kubernetes.server_address(),
            Self::Manifests(_) => None,
        }
    }

    pub(super) async fn run(
        self,
        updates: mpsc::Sender<Update>,
        metrics: Arc<Metrics>,
        mode: watch::Receiver<ModeInForce>,
        config: Arc<Config>,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        match self {
            Self::Kubernetes(kubernetes) => {
                tracing::info!(server = kubernetes.server(), "watching the API server");
                let (wants, wanted) = watch::channel(false);
                tokio::select! {
                    done = kubernetes.with_service_cidrs_while(wanted).run(updates) => done?,
                    () = want_service_cidrs(mode, &config, wants) => {}
                    () = stop.cancelled() => {}
                }
            }
            Self::Manifests(manifests) => {
                let report = move |field: InvalidField| {
                    metrics.own.invalid_objects.found(field.resource(), 1);
                    tracing::warn!(object = field.object, field = field.field, "{}", field.problem);
                };
                stop.run_until_cancelled(manifests.run(updates, report)).await.transpose()?;
            }
        }
        Ok(())
    }
}

/// Asks for ServiceCIDRs while the active mode reads them. It never completes, because the last
/// mode stays in force. `config` is the configuration at the start. A change of the fields that
/// matter here needs a new process.
async fn want_service_cidrs(
    mut mode: watch::Receiver<ModeInForce>,
    config: &Config,
    wants: watch::Sender<bool>,
) {
    loop {
        let active_mode = mode.borrow_and_update().modes.active;
        wants.send_if_modified(|wants| {
            let before = std::mem::replace(wants, modes::reads_service_cidrs(active_mode, config));
            before != *wants
        });
        if mode.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
