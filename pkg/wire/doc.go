// Package wire converts between the types of the agent's API and those of Kubernetes.
//
// What comes over the wire was written by somebody else: conversions never panic, and their errors name the key at fault.
package wire
