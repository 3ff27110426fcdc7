//! Addresses and networks as Go's "sloppy" parsers read them: zeros in front of a number of an IPv4 address mean
//! nothing.

use std::net::{IpAddr, SocketAddr};

use ipnet::{IpNet, Ipv4Net};

pub(super) fn address(text: &str) -> Option<IpAddr> {
    if text.contains(':') {
        // A zone, such as %eth0, is refused by both.
        return without_zeros_after_the_last_colon(text).parse().ok();
    }
    without_zeros(text).parse().ok()
}

/// Of an IPv6 address only a final IPv4 part can have zeros that matter.
fn without_zeros_after_the_last_colon(text: &str) -> String {
    match text.rsplit_once(':') {
        Some((head, tail)) if tail.contains('.') => format!("{head}:{}", without_zeros(tail)),
        Some(_) | None => text.to_owned(),
    }
}

fn without_zeros(text: &str) -> String {
    let number = |part: &str| {
        let rest = part.trim_start_matches('0');
        if rest.is_empty() && !part.is_empty() { "0".to_owned() } else { rest.to_owned() }
    };
    text.split('.').map(number).collect::<Vec<_>>().join(".")
}

pub(super) fn network(text: &str) -> Option<IpNet> {
    let (ip, length) = text.split_once('/')?;
    if length.is_empty() || !length.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (address, length) = (address(ip)?, length.parse::<u8>().ok()?);
    // An IPv4 network that is written as one of IPv6 is one of IPv4.
    match (address.to_canonical(), length.checked_sub(96)) {
        (IpAddr::V4(mapped), Some(length)) if address.is_ipv6() => {
            Ipv4Net::new(mapped, length).map(Into::into).ok()
        }
        _ => IpNet::new(address, length).ok(),
    }
}

/// `address:port`, `[address]:port`, or an address alone, which takes `port`.
pub(super) fn listen_address(text: &str, port: u16) -> Option<SocketAddr> {
    if let Some(alone) = address(text) {
        return Some(SocketAddr::new(alone, port));
    }
    let (host, port) = text.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    let port = port.parse().ok().filter(|port| *port != 0)?;
    Some(SocketAddr::new(address(host)?, port))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("10.0.0.1", Some("10.0.0.1"))]
    #[case("010.000.00.1", Some("10.0.0.1"))]
    #[case("FD00::1", Some("fd00::1"))]
    #[case("::ffff:010.0.0.1", Some("::ffff:10.0.0.1"))]
    #[case("10.0.0", None)]
    #[case("10..0.1", None)]
    #[case("localhost", None)]
    #[case("fe80::1%eth0", None)]
    #[case("", None)]
    fn addresses(#[case] text: &str, #[case] right: Option<&str>) {
        assert_eq!(address(text), right.map(|right| right.parse().unwrap()));
    }

    #[rstest]
    #[case("10.0.0.0/8", Some("10.0.0.0/8"))]
    #[case("010.1.2.3/8", Some("10.1.2.3/8"))]
    #[case("fd00::/48", Some("fd00::/48"))]
    #[case("::ffff:10.0.0.0/104", Some("10.0.0.0/8"))]
    #[case("::ffff:0:0/96", Some("0.0.0.0/0"))]
    #[case("::ffff:10.0.0.0/64", Some("::ffff:10.0.0.0/64"))]
    #[case("::ffff:10.0.0.0/129", None)]
    #[case("10.0.0.0/33", None)]
    #[case("10.0.0.0/+8", None)]
    #[case("10.0.0.0", None)]
    #[case(" 10.0.0.0/8", None)]
    fn networks(#[case] text: &str, #[case] right: Option<&str>) {
        assert_eq!(network(text), right.map(|right| right.parse().unwrap()));
    }

    #[rstest]
    #[case("10.0.0.1", Some("10.0.0.1:9"))]
    #[case("::", Some("[::]:9"))]
    #[case("10.0.0.1:80", Some("10.0.0.1:80"))]
    #[case("[::1]:80", Some("[::1]:80"))]
    #[case("[10.0.0.1]:80", Some("10.0.0.1:80"))]
    #[case("10.0.0.1:0", None)]
    #[case("10.0.0.1:65536", None)]
    #[case("localhost:80", None)]
    #[case(":80", None)]
    #[case("[::1", None)]
    fn listen_addresses(#[case] text: &str, #[case] right: Option<&str>) {
        assert_eq!(listen_address(text, 9), right.map(|right| right.parse().unwrap()));
    }
}
