//! What a mode cannot do for a service port.
//!
//! The rule is to fail closed: an address that must be open to some clients only is not served at all.

use std::sync::Arc;

use crate::model::desired::{DesiredPort, FrontendKind};

/// A field of a Service that a mode does not honour.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Unsupported {
    /// As Kubernetes names it: `spec.sessionAffinity`.
    pub field: &'static str,
    pub effect: Effect,
    /// What happens instead, for people.
    pub instead: &'static str,
}

/// What of the service port is served nevertheless.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Effect {
    /// Every frontend, but not as the field says.
    ServedDifferently,
    /// Every frontend but those of this kind.
    Without(FrontendKind),
    NotServed,
}

impl Effect {
    /// As `status` shows it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ServedDifferently => "servedDifferently",
            Self::Without(_) => "partlyServed",
            Self::NotServed => "notServed",
        }
    }
}

impl Unsupported {
    /// Some frontend of the service port is not served.
    pub fn leaves_unserved(&self) -> bool {
        self.effect != Effect::ServedDifferently
    }
}

/// The part of the port that the mode serves, mostly the port itself; `None`: nothing of it.
pub fn servable(port: Arc<DesiredPort>, unsupported: &[Unsupported]) -> Option<Arc<DesiredPort>> {
    let mut served = port;
    for one in unsupported {
        match one.effect {
            Effect::ServedDifferently => {}
            Effect::Without(kind) => {
                Arc::make_mut(&mut served).frontends.retain(|frontend| frontend.kind != kind);
            }
            Effect::NotServed => return None,
        }
    }
    Some(served)
}
