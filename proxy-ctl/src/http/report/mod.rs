//! The reports that the HTTP servers show: health, health checks of Services, signs of life,
//! metrics, and the mode.

mod health;
mod health_checks;
mod heartbeat;
mod metrics;
mod mode;

pub use health::{Health, HealthReport, Moment, SharedHealth};
pub use health_checks::{HealthCheckAddresses, HealthChecks};
pub use heartbeat::{Heartbeat, Heartbeats, STUCK_AFTER};
pub use metrics::{Metrics, ModeFamilies, Pending, Phase, SyncKind};
pub(crate) use metrics::{kubernetes, process};
pub use mode::{ModeChoice, ModeInForce};
