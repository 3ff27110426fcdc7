//! The rules of one family, and when they are written.

use super::rules::{self, JUMPS};
use crate::{
    model::objects::IpFamily,
    modes::netfilter::chains::{Chains, FamilyChains, Jump, can_translate},
    sys::xtables::ToolError,
};

/// The tools of iptables, as far as this mode uses them.
pub(super) trait RuleTools: Send {
    fn family(&self) -> IpFamily;

    /// Returns the number of runs of iptables-restore that failed.
    fn failures(&self) -> u64;

    /// Returns the table as iptables-save prints it.
    fn saved(&self, table: &str) -> Result<String, ToolError>;

    /// Writes the chains and jumps. Returns the number of tables that were written.
    fn write(&mut self, chains: &Chains, jumps: &[Jump]) -> Result<u64, ToolError>;
}

impl RuleTools for FamilyChains {
    fn family(&self) -> IpFamily {
        self.family
    }

    fn failures(&self) -> u64 {
        self.failures
    }

    fn saved(&self, table: &str) -> Result<String, ToolError> {
        Self::saved(self, table)
    }

    fn write(&mut self, chains: &Chains, jumps: &[Jump]) -> Result<u64, ToolError> {
        Self::write(self, chains, jumps)
    }
}

/// Returns true if the node can be programmed in this family.
pub(super) fn is_served(rules: &impl RuleTools) -> bool {
    can_translate(rules.family(), || rules.saved("nat"))
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Step {
    /// The write before virtual servers, which need the rules. Where another mode serves by the
    /// same chains, only chains that it does not write are written.
    BeforeServers,
    /// The write of everything that is not written yet. After it another mode serves no longer.
    AfterAll,
}

pub(super) struct FamilyRules {
    tools: Box<dyn RuleTools>,
    /// The chains of the last write. `None`: the kernel's chains are not known.
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

    /// Forgets the chains, so that the kernel's rules are read again before the next write.
    pub(super) fn forget(&mut self) {
        self.written = None;
    }

    /// Writes the chains. Returns the number of tables that were written.
    pub(super) fn write(&mut self, step: Step, chains: &Chains) -> Result<u64, ToolError> {
        if self.written.as_ref() == Some(chains) {
            return Ok(0);
        }
        if step == Step::BeforeServers && rules::another_mode_serves(&self.tools.saved("nat")?) {
            return self.tools.write(&rules::own_chains(chains), &JUMPS);
        }
        let count = self.tools.write(chains, &JUMPS)?;
        self.written = Some(chains.clone());
        Ok(count)
    }
}
