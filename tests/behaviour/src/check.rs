//! Judging outcomes: each check says what was expected and what was found.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Result, bail, ensure};
use lab::{Answer, Outcome, wait};

use crate::setting::Setting;

/// Every request was answered.
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

/// Every request was answered, by nobody but these, and by each of them.
pub fn answered_by(outcomes: &[Outcome], expected: &[&str]) -> Result<Vec<Answer>> {
    let answers = answered(outcomes)?;
    let counts = shares(&answers);
    let names: Vec<&str> = counts.keys().copied().collect();
    let mut wanted = expected.to_vec();
    wanted.sort_unstable();
    ensure!(names == wanted, "expected answers by {wanted:?}, found {counts:?}");
    Ok(answers)
}

/// Whom the endpoints took for the client.
pub fn saw(answers: &[Answer], client: &str, is_right: impl Fn(IpAddr) -> bool) -> Result<()> {
    for Answer { by, source, .. } in answers {
        ensure!(is_right(source.ip()), "{by} saw {source} as the address of {client}");
    }
    Ok(())
}

/// The number of answers by two endpoints that [`roughly_even`] is asked about. If each is drawn
/// evenly, it fails with a chance of less than 1e-12. Of 100 answers it was 2e-7, some fifty times
/// a run.
pub const MANY: u32 = 200;

/// Nobody has less than half of an even share.
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

/// Every request was refused, within a second.
///
/// Netfilter rejects with ICMP. The kernel overlooks that while `connect` still holds the socket, and then
/// takes it only after the SYN was sent again, a second later; to a local process the rejected datagram is EPERM.
/// Where a socket hook cannot choose the error, `connect` fails with EPERM.
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

/// Has this kernel `bpf_set_retval` for socket hooks?
fn has_set_retval() -> Result<bool> {
    is_kernel((5, 18))
}

/// Is the kernel of this version, or a newer one?
pub fn is_kernel(least: (u32, u32)) -> Result<bool> {
    let uname = nix::sys::utsname::uname()?;
    let release = uname.release().to_string_lossy();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        bail!("kernel release {release} does not begin with a version")
    };
    Ok((major, minor) >= least)
}

/// Every request vanished: it was neither answered nor refused. What netfilter drops of a local process is EPERM to it.
pub fn dropped(setting: Setting, outcomes: &[Outcome]) -> Result<()> {
    for outcome in outcomes {
        let by_netfilter = setting.datapath().is_netfilter() && *outcome == Outcome::NotPermitted;
        ensure!(by_netfilter || *outcome == Outcome::TimedOut, "expected dropped, found {outcome}");
    }
    ensure!(!outcomes.is_empty(), "no request was made");
    Ok(())
}
