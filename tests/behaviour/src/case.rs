//! Scenarios, and where their results are known to differ.

use std::fmt;

use anyhow::{Error, Result};
use lab::{
    Protocol,
    address::{FAMILIES, Family},
};

use serde_json::{Value, json};

use crate::{setting::Setting, world::World};

pub type Run = fn(&mut World, Variant) -> Result<()>;

/// Scenario that runs once for each of its variants.
pub struct Case {
    pub name: &'static str,
    pub variants: Variants,
    /// True for the small set of scenarios that virtual machines run.
    pub core: bool,
    /// Returns the difference where the result is known to differ. There the case must fail, with
    /// the words of the difference.
    pub differs: fn(&Setting, Variant) -> Option<Difference>,
    /// Returns false for proxies to which the scenario does not apply.
    pub concerns: fn(&Setting) -> bool,
    /// Fields that are merged into the proxies' configuration. Cases with the same fields stand
    /// together, because other fields need other processes.
    pub configuration: fn() -> Value,
    pub run: Run,
}

impl Case {
    pub const fn new(name: &'static str, variants: Variants, run: Run) -> Self {
        Self {
            name,
            variants,
            core: false,
            differs: |_, _| None,
            concerns: |_| true,
            configuration: || json!({}),
            run,
        }
    }

    pub const fn core(mut self) -> Self {
        self.core = true;
        self
    }

    pub const fn configured(mut self, configuration: fn() -> Value) -> Self {
        self.configuration = configuration;
        self
    }

    /// Limits the case to settings for which `concerns` returns true.
    pub const fn concerns(mut self, concerns: fn(&Setting) -> bool) -> Self {
        self.concerns = concerns;
        self
    }

    pub const fn differs(mut self, differs: fn(&Setting, Variant) -> Option<Difference>) -> Self {
        self.differs = differs;
        self
    }
}

/// Failure that is known, with its reason.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Difference {
    pub why: &'static str,
    /// Words one of which the error must have. Another error is a failure.
    pub says: &'static [&'static str],
}

impl Difference {
    pub fn explains(&self, error: &Error) -> bool {
        let error = format!("{error:#}");
        self.says.iter().any(|words| error.contains(words))
    }
}

/// Words that the checks, or the contexts of their errors, use.
pub mod says {
    pub const NOT_ANSWERED: &[&str] = &["is not answered: "];
    pub const NOT_DROPPED: &[&str] = &["expected dropped, found "];
    pub const OTHER_CLIENT: &[&str] = &[" as the address of "];
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Variant {
    pub protocol: Protocol,
    pub family: Family,
}

impl fmt::Display for Variant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.protocol, self.family)
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Variants {
    /// TCP and UDP, IPv4 and IPv6.
    All,
    Tcp,
    Udp,
    /// TCP and UDP over IPv4.
    V4,
    /// A single variant, because the scenario looks at all protocols and families itself.
    Once,
}

impl Variants {
    pub fn list(self) -> Vec<Variant> {
        let protocols: &[Protocol] = match self {
            Self::All | Self::V4 => &[Protocol::Tcp, Protocol::Udp],
            Self::Tcp | Self::Once => &[Protocol::Tcp],
            Self::Udp => &[Protocol::Udp],
        };
        let families: &[Family] = match self {
            Self::All | Self::Tcp | Self::Udp => &FAMILIES,
            Self::V4 | Self::Once => &[Family::V4],
        };
        let every = |protocol: &Protocol| {
            let protocol = *protocol;
            families.iter().map(move |family| Variant { protocol, family: *family })
        };
        protocols.iter().flat_map(every).collect()
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;
    use lab::Outcome;

    use super::*;
    use crate::{
        check,
        setting::{PathKind, ProxyKind},
    };

    const SETTING: Setting = Setting::new(ProxyKind::Userspace, PathKind::Packets);

    #[test]
    fn a_difference_is_what_its_check_says_and_no_other_error() {
        let refused = [Outcome::Refused { micros: 7 }];
        let in_context = |error: Error| error.context("from node1 to 10.96.0.1:80");
        for (says, error) in [
            (says::NOT_ANSWERED, check::answered_by(&refused, &["web-1"]).unwrap_err()),
            (says::NOT_DROPPED, check::dropped(SETTING, &refused).unwrap_err()),
        ] {
            let difference = Difference { why: "it does", says };
            assert!(difference.explains(&in_context(error)));
            assert!(!difference.explains(&in_context(anyhow!("agent node1 is gone"))));
            assert!(!difference.explains(&in_context(anyhow!("node1 serves version 7: not after 60 s"))));
        }
    }
}
