use std::net::IpAddr;

use serde_json::Value;

use super::InvalidField;
use crate::kubernetes::schema::ApiObject;

mod node;
mod service;
mod slice;

/// Returns `object` with `changes` merged into it.
fn merged(mut object: Value, changes: Value) -> Value {
    fn merge(into: &mut Value, changes: Value) {
        match (into, changes) {
            (Value::Object(into), Value::Object(changes)) => {
                for (key, change) in changes {
                    merge(into.entry(key).or_insert(Value::Null), change);
                }
            }
            (into, change) => *into = change,
        }
    }
    merge(&mut object, changes);
    object
}

fn shown(invalid: &[InvalidField]) -> Vec<(&str, &str)> {
    invalid.iter().map(|field| (field.field.as_str(), field.problem.as_str())).collect()
}

fn ips(addresses: &[&str]) -> Vec<IpAddr> {
    addresses.iter().map(|address| address.parse().unwrap()).collect()
}

/// Reads an object from JSON, and checks that its protobuf encoding reads as the same.
fn read<T: ApiObject>(object: Value) -> T {
    let object: T = serde_json::from_value(object).unwrap();
    assert_eq!(T::decode(object.encode_to_vec().as_slice()).unwrap(), object);
    object
}
