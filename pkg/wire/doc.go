// Package wire converts between the types of the agent's API and those of Kubernetes.
//
// Data from the wire is not trusted: conversions never panic, and their errors name the invalid
// key.
package wire
