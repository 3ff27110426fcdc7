//! The rules of one family, and when they are written.

use super::rules::JUMPS;
use crate::{
    dataplane::netfilter::chains::{Chains, FamilyChains, Jump},
    model::objects::IpFamily,
    sys::xtables::ToolError,
};

/// What is asked of the tools of iptables.
pub(super) trait RuleTools: Send {
    fn family(&self) -> IpFamily;

    /// Runs of iptables-restore that failed.
    fn failures(&self) -> u64;

    /// Answers how many tables were written.
    fn write(&mut self, chains: &Chains, jumps: &[Jump]) -> Result<u64, ToolError>;
}

impl RuleTools for FamilyChains {
    fn family(&self) -> IpFamily {
        self.family
    }

    fn failures(&self) -> u64 {
        self.failures
    }

    fn write(&mut self, chains: &Chains, jumps: &[Jump]) -> Result<u64, ToolError> {
        Self::write(self, chains, jumps)
    }
}

pub(super) struct FamilyRules {
    tools: Box<dyn RuleTools>,
    /// As they were written last; `None`: not known.
    written: Option<Chains>,
}

impl FamilyRules {
    pub(super) fn new(tools: impl RuleTools + 'static) -> Self {
        Self { tools: Box::new(tools), written: None }
    }

    pub(super) fn family(&self) -> IpFamily {
        self.tools.family()
    }

    pub(super) fn failures(&self) -> u64 {
        self.tools.failures()
    }

    /// What is there is read again before the next write.
    pub(super) fn forget(&mut self) {
        self.written = None;
    }

    pub(super) fn write(&mut self, chains: Chains) -> Result<u64, ToolError> {
        if self.written.as_ref() == Some(&chains) {
            return Ok(0);
        }
        let count = self.tools.write(&chains, &JUMPS)?;
        self.written = Some(chains);
        Ok(count)
    }
}
