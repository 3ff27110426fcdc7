//! kube-proxy's hash, which distinguishes long names.

use sha2::{Digest as _, Sha256};

/// Returns the first 16 characters of the base32 encoding (RFC 4648) of SHA-256 over all parts, one
/// after the other.
pub fn hash(parts: &[&str]) -> String {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let mut sha = Sha256::new();
    parts.iter().for_each(|part| sha.update(part));
    let bytes = sha.finalize();
    let bits = bytes.iter().take(10).fold(0_u128, |bits, byte| bits << 8 | u128::from(*byte));
    (0..16).rev().map(|index| char::from(ALPHABET[(bits >> (index * 5)) as usize & 31])).collect()
}
