//! Facts about a process from /proc.

use std::{fmt, fs};

/// Returns the numbers of /proc/PROCESS/stat, counted as in proc(5). `process` is an id or `self`.
pub fn stat(process: impl fmt::Display) -> Option<impl Fn(usize) -> Option<u64>> {
    numbers(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
}

fn numbers(stat: &str) -> Option<impl Fn(usize) -> Option<u64> + use<>> {
    // The second field, a name, may contain spaces and brackets. So fields are counted from behind
    // its last bracket.
    let fields = stat.rsplit_once(')')?.1.to_owned();
    Some(move |number: usize| fields.split_whitespace().nth(number.checked_sub(3)?)?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_counted_after_the_name() {
        let stat = numbers("7 (a) b) S 1 7 7 0 -1 4194560 99 0 0 0 150 50").unwrap();
        assert_eq!([2, 3, 4, 14, 15, 16].map(stat), [None, None, Some(1), Some(150), Some(50), None]);
        assert!(numbers("").is_none());
    }
}
