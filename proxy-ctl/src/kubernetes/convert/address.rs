//! Parsing of addresses in the forms that Kubernetes accepts.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

/// Parses an address. IPv4 numbers with leading zeros are decimal, as they were before Go 1.17 and
/// still are for kube-proxy. An IPv4-mapped IPv6 address becomes the IPv4 address.
pub(super) fn parse(text: &str) -> Option<IpAddr> {
    let address = text.parse::<IpAddr>().ok().or_else(|| parse_decimal(text).map(IpAddr::V4))?;
    Some(address.to_canonical())
}

fn parse_decimal(text: &str) -> Option<Ipv4Addr> {
    let mut numbers = [0; 4];
    let mut parts = text.split('.');
    for number in &mut numbers {
        let part = parts.next()?;
        if part.is_empty() || !part.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        *number = part.parse().ok()?;
    }
    parts.next().is_none().then(|| numbers.into())
}

/// Parses an address range. Space around it is ignored, and bits beyond the prefix are cleared.
pub(super) fn parse_range(text: &str) -> Option<IpNet> {
    let (address, prefix) = text.trim().split_once('/')?;
    if prefix.is_empty() || !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let address = address.parse::<IpAddr>().ok().or_else(|| parse_decimal(address).map(IpAddr::V4))?;
    IpNet::new(address, prefix.parse().ok()?).ok().map(|range| range.trunc())
}
