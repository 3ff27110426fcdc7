//! The names of the functions in which the addresses of call stacks lie.

use std::{collections::HashMap, ffi::c_void};

/// The name of an innermost address that lies in no known function, such as one of the kernel's
/// vDSO.
const UNKNOWN: &str = "[unknown]";

/// The names that were looked up. Until this is dropped, the symbols of the program are kept in
/// memory.
#[derive(Debug, Default)]
pub struct SymbolNames {
    known: HashMap<usize, Vec<String>>,
}

impl SymbolNames {
    /// Returns the functions of a call stack, the innermost first. There are more functions than
    /// addresses if functions are inlined, and fewer if an address is not known.
    pub fn of(&mut self, frames: &[usize]) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for (index, address) in frames.iter().enumerate() {
            let found = self.known.entry(*address).or_insert_with(|| look_up(*address));
            if found.is_empty() && index == 0 {
                names.push(UNKNOWN.to_owned());
            }
            names.extend_from_slice(found);
        }
        names
    }
}

impl Drop for SymbolNames {
    fn drop(&mut self) {
        backtrace::clear_symbol_cache();
    }
}

fn look_up(address: usize) -> Vec<String> {
    let mut names = Vec::new();
    backtrace::resolve(std::ptr::without_provenance_mut::<c_void>(address), |symbol| {
        // The alternate format leaves out the hash behind the name.
        names.extend(symbol.name().map(|name| without_trait(&format!("{name:#}"))));
    });
    names
}

/// Shortens `<a::B as c::D>::e` to `a::B::e`, because tools that read profiles do not show text in
/// angle brackets.
fn without_trait(name: &str) -> String {
    let Some(inner) = name.strip_prefix('<') else { return name.to_owned() };
    let mut depth = 1_u32;
    let mut type_end = None;
    for (at, char) in inner.char_indices() {
        match char {
            '<' => depth += 1,
            // The `>` in the arrow of a function's type does not count.
            '>' if !inner[..at].ends_with('-') => depth -= 1,
            ' ' if depth == 1 && inner[at..].starts_with(" as ") => type_end = type_end.or(Some(at)),
            _ => {}
        }
        if depth == 0 {
            let of = &inner[..type_end.unwrap_or(at)];
            return format!("{}{}", without_trait(of), &inner[at + 1..]);
        }
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("a::b::c", "a::b::c")]
    #[case("<a::B as c::D>::e", "a::B::e")]
    #[case("<a::B<c::D>>::e", "a::B<c::D>::e")]
    #[case("<<a::B as c::D>::F as g::H>::i", "a::B::F::i")]
    #[case("<fn() -> u8 as c::D>::e", "fn() -> u8::e")]
    #[case("<broken", "<broken")]
    fn names_without_traits(#[case] name: &str, #[case] shown: &str) {
        assert_eq!(without_trait(name), shown);
    }

    #[test]
    fn an_address_in_a_function_has_its_name() {
        #[inline(never)]
        fn known() -> u32 {
            std::hint::black_box(7)
        }
        let inside = known as fn() -> u32 as usize + 1;
        let names = SymbolNames::default().of(&[inside]);
        let named =
            |name: &String| name.starts_with("proxy_ctl::profile::names") && name.ends_with("::known");
        assert!(names.iter().any(named), "{names:?}");
    }

    #[test]
    fn what_is_in_no_function_is_named_only_where_it_is_innermost() {
        let mut names = SymbolNames::default();
        assert_eq!(names.of(&[1, 1]), ["[unknown]"]);
        assert_eq!(names.of(&[]), [""; 0]);
    }
}
