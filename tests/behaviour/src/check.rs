//! Checks of outcomes. The error of each check says what was expected and what was found.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Result, bail, ensure};
use lab::{Answer, Outcome, wait};

use crate::setting::Setting;

/// Expects every request to be answered, and returns the answers.
pub fn answered(outcomes: &[Outcome]) -> Result<Vec<Answer>> {
    let answered = |outcome: &Outcome| {
        let Outcome::Answered(answer) = outcome else {
            bail!("of {} requests one is not answered: {outcome}", outcomes.len())
        };
        Ok(answer.clone())
    };
    ensure!(!outcomes.is_empty(), "no request was made");
    outcomes.iter().map(answered).collect()
}

/// Expects every request to be answered by one of these servers, and each of them to answer one.
pub fn answered_by(outcomes: &[Outcome], expected: &[&str]) -> Result<Vec<Answer>> {
    let answers = answered(outcomes)?;
    let counts = shares(&answers);
    let names: Vec<&str> = counts.keys().copied().collect();
    let mut wanted = expected.to_vec();
    wanted.sort_unstable();
    ensure!(names == wanted, "expected answers by {wanted:?}, found {counts:?}");
    Ok(answers)
}

/// Expects the endpoints to see an address of the client for which `is_right` returns true.
pub fn saw(answers: &[Answer], client: &str, is_right: impl Fn(IpAddr) -> bool) -> Result<()> {
    for Answer { by, source, .. } in answers {
        ensure!(is_right(source.ip()), "{by} saw {source} as the address of {client}");
    }
    Ok(())
}

/// Number of answers by two endpoints that [`roughly_even`] needs. If each is drawn evenly, the
/// check fails with a chance below 1e-12. With 100 answers the chance was 2e-7, at some fifty
/// checks a run.
pub const MANY: u32 = 200;

/// Expects each server to have at least half of an even share.
pub fn roughly_even(answers: &[Answer]) -> Result<()> {
    let counts = shares(answers);
    let least = counts.values().min().copied().unwrap_or(0);
    ensure!(least * counts.len() * 2 >= answers.len(), "uneven: {counts:?}");
    Ok(())
}

fn shares(answers: &[Answer]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for answer in answers {
        *counts.entry(answer.by.as_str()).or_default() += 1;
    }
    counts
}

/// Expects every request to be refused within a second.
///
/// Netfilter rejects with ICMP. The kernel ignores the error while `connect` still holds the
/// socket. So it counts only after the SYN is sent again, a second later. A local process gets
/// EPERM for a rejected datagram. Before Linux 5.18, a socket hook cannot choose the error, and
/// `connect` fails with EPERM.
pub fn refused_at_once(setting: Setting, outcomes: &[Outcome]) -> Result<()> {
    let by_icmp = setting.datapath().is_netfilter();
    let limit_micros = if by_icmp { 4_000_000 } else { 1_000_000 } * u64::from(wait::patience());
    let may_be_not_permitted = by_icmp || !has_set_retval()?;
    for outcome in outcomes {
        if may_be_not_permitted && *outcome == Outcome::NotPermitted {
            continue;
        }
        let Outcome::Refused { micros } = outcome else { bail!("expected refused, found {outcome}") };
        ensure!(*micros < limit_micros, "refused only after {micros} us");
    }
    ensure!(!outcomes.is_empty(), "no request was made");
    Ok(())
}

/// Returns true if this kernel has `bpf_set_retval` for socket hooks.
fn has_set_retval() -> Result<bool> {
    is_kernel((5, 18))
}

/// Returns true if the kernel has this version or a newer one.
pub fn is_kernel(least: (u32, u32)) -> Result<bool> {
    let uname = nix::sys::utsname::uname()?;
    let release = uname.release().to_string_lossy();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        bail!("kernel release {release} does not begin with a version")
    };
    Ok((major, minor) >= least)
}

/// Expects every request to vanish, neither answered nor refused. A local process gets EPERM for
/// what netfilter drops.
pub fn dropped(setting: Setting, outcomes: &[Outcome]) -> Result<()> {
    for outcome in outcomes {
        let by_netfilter = setting.datapath().is_netfilter() && *outcome == Outcome::NotPermitted;
        ensure!(by_netfilter || *outcome == Outcome::TimedOut, "expected dropped, found {outcome}");
    }
    ensure!(!outcomes.is_empty(), "no request was made");
    Ok(())
}
