//! Addresses, as keys and values of all maps hold them.

/// An address as maps hold it: 4 bytes of IPv4 or 16 bytes of IPv6, in network order.
pub trait Address: Copy + Eq + Default + AsRef<[u8]> + AsMut<[u8]> + 'static {
    const UNSPECIFIED: Self;
    const BITS: u32;

    /// Returns `other` if all bits of `mask` are 1, and the address itself if all are 0.
    fn or_if(&self, other: &Self, mask: u64) -> Self;

    /// Returns 0 if both addresses are the same.
    fn difference(&self, other: &Self) -> u64;

    /// Returns two numbers whose order, upper one first, is that of the addresses.
    fn halves(&self) -> [u64; 2];

    /// Returns true if the first `bits` bits are those of `range`.
    #[inline(always)]
    fn is_in(&self, range: &Self, bits: u32) -> bool {
        let ([upper, lower], [range_upper, range_lower]) = (self.halves(), range.halves());
        let rest = Self::BITS.saturating_sub(bits);
        let differs = |one: u64, other: u64, rest: u32| (one ^ other).checked_shr(rest).unwrap_or(0) != 0;
        if rest >= u64::BITS {
            !differs(upper, range_upper, rest - u64::BITS)
        } else {
            upper == range_upper && !differs(lower, range_lower, rest)
        }
    }
}

impl Address for [u8; 4] {
    const UNSPECIFIED: Self = [0; 4];
    const BITS: u32 = u32::BITS;

    #[inline(always)]
    fn or_if(&self, other: &Self, mask: u64) -> Self {
        let (own, other) = (u32::from_ne_bytes(*self), u32::from_ne_bytes(*other));
        (own ^ ((own ^ other) & mask as u32)).to_ne_bytes()
    }

    #[inline(always)]
    fn difference(&self, other: &Self) -> u64 {
        (u32::from_ne_bytes(*self) ^ u32::from_ne_bytes(*other)).into()
    }

    #[inline(always)]
    fn halves(&self) -> [u64; 2] {
        [0, u32::from_be_bytes(*self).into()]
    }
}

impl Address for [u8; 16] {
    const UNSPECIFIED: Self = [0; 16];
    const BITS: u32 = u128::BITS;

    #[inline(always)]
    fn or_if(&self, other: &Self, mask: u64) -> Self {
        let ([first, second], [other_first, other_second]) = (words(self), words(other));
        let chosen = [first ^ ((first ^ other_first) & mask), second ^ ((second ^ other_second) & mask)];
        let mut address = [0; 16];
        let (of_first, of_second) = address.split_at_mut(8);
        of_first.copy_from_slice(&chosen[0].to_ne_bytes());
        of_second.copy_from_slice(&chosen[1].to_ne_bytes());
        address
    }

    #[inline(always)]
    fn difference(&self, other: &Self) -> u64 {
        let ([first, second], [other_first, other_second]) = (words(self), words(other));
        (first ^ other_first) | (second ^ other_second)
    }

    #[inline(always)]
    fn halves(&self) -> [u64; 2] {
        let whole = u128::from_be_bytes(*self);
        [(whole >> 64) as u64, whole as u64]
    }
}

/// Returns the address as two words in the byte order of this machine's memory.
#[inline(always)]
fn words(address: &[u8; 16]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *address;
    [u64::from_ne_bytes([a, b, c, d, e, f, g, h]), u64::from_ne_bytes([i, j, k, l, m, n, o, p])]
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::all(0, [203, 0, 113, 1], true)]
    #[case::first_bit(1, [192, 0, 2, 1], false)]
    #[case::most_bits(25, [10, 244, 1, 127], true)]
    #[case::most_bits_and_one_differs(25, [10, 244, 1, 128], false)]
    #[case::each_bit(32, [10, 244, 1, 0], true)]
    #[case::each_bit_and_the_last_differs(32, [10, 244, 1, 1], false)]
    fn ranges(#[case] bits: u32, #[case] address: [u8; 4], #[case] expected: bool) {
        assert_eq!(address.is_in(&[10, 244, 1, 0], bits), expected);
        for index in [0, 4, 8, 12] {
            let of6 = |four: [u8; 4]| {
                let mut all = [7; 16];
                all[index..index + 4].copy_from_slice(&four);
                all
            };
            let bits = index as u32 * 8 + bits;
            assert_eq!(of6(address).is_in(&of6([10, 244, 1, 0]), bits), expected, "{index}");
        }
    }
}
