//! Which functions the addresses of call stacks are in.

use std::{collections::HashMap, ffi::c_void};

/// What stands for an innermost address in no function that is known, such as one of the kernel's vDSO.
const UNKNOWN: &str = "[unknown]";
/// What lies between a function and the allocator: how its containers ask for memory.
const ON_THE_WAY_TO_MEMORY: [&str; 8] = [
    "proxy_ctl::sys::",
    "proxy_ctl::profile::",
    "__r",
    "alloc::",
    "core::",
    "hashbrown::",
    "bytes::",
    "std::alloc::",
];

/// Names that were looked up. Until it is dropped, the symbols of the program are kept in memory.
#[derive(Debug, Default)]
pub struct Names {
    known: HashMap<usize, Vec<String>>,
}

impl Names {
    /// The functions of a call stack, the innermost first. There are more than addresses where functions are inlined,
    /// and fewer where an address is not known.
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

    /// As [`Self::of`], from the function that wanted memory on.
    pub fn of_call_site(&mut self, frames: &[usize]) -> Vec<String> {
        from_call_site(self.of(frames))
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        backtrace::clear_symbol_cache();
    }
}

fn look_up(address: usize) -> Vec<String> {
    let mut names = Vec::new();
    backtrace::resolve(std::ptr::without_provenance_mut::<c_void>(address), |symbol| {
        // Without the hash behind it.
        names.extend(symbol.name().map(|name| without_trait(&format!("{name:#}"))));
    });
    names
}

fn from_call_site(mut names: Vec<String>) -> Vec<String> {
    let is_on_the_way = |name: &String| ON_THE_WAY_TO_MEMORY.iter().any(|start| name.starts_with(start));
    let call_site = names.iter().position(|name| !is_on_the_way(name)).unwrap_or(0);
    names.split_off(call_site)
}

/// `<a::B as c::D>::e` → `a::B::e`: what stands in angle brackets is not shown by the tools that read profiles.
fn without_trait(name: &str) -> String {
    let Some(inner) = name.strip_prefix('<') else { return name.to_owned() };
    let mut depth = 1_u32;
    let mut type_end = None;
    for (at, char) in inner.char_indices() {
        match char {
            '<' => depth += 1,
            // Not the arrow of a function's type.
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
    use crate::sys::frames::{self, Frames};

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
    fn a_stack_names_the_functions_that_called_each_other() {
        #[inline(never)]
        fn inner() -> Vec<String> {
            std::hint::black_box(Names::default().of(Frames::here().addresses()))
        }
        #[inline(never)]
        fn outer() -> Vec<String> {
            std::hint::black_box(inner())
        }
        frames::prepare().unwrap();
        let names = outer();
        let place = |function: &str| {
            let named =
                |name: &String| name.starts_with("proxy_ctl::profile::names") && name.ends_with(function);
            names.iter().position(named).unwrap_or_else(|| panic!("{function}: {names:#?}"))
        };
        assert_eq!(place("::inner"), 0);
        assert_eq!(place("::outer"), 1);
    }

    #[test]
    fn what_is_in_no_function_is_named_only_where_it_is_innermost() {
        let mut names = Names::default();
        assert_eq!(names.of(&[1, 1]), ["[unknown]"]);
        assert_eq!(names.of(&[]), [""; 0]);
    }

    #[rstest]
    #[case(&["alloc::vec::Vec<T>::push", "a::b", "alloc::c"], &["a::b", "alloc::c"])]
    #[case(&["__rust_alloc", "alloc::alloc", "hashbrown::raw", "a::b"], &["a::b"])]
    #[case(&["alloc::a", "core::b"], &["alloc::a", "core::b"])]
    #[case(&[], &[])]
    fn memory_is_that_of_the_function_that_wanted_it(#[case] stack: &[&str], #[case] kept: &[&str]) {
        assert_eq!(from_call_site(stack.iter().map(|name| (*name).to_owned()).collect()), kept);
    }
}
