// Package journey watches how pending pods become nodes: NodeClaims in the spoke, claims and Machines in the hub, Nodes in
// the spoke again. It records when each was first seen to be where, by watches: API servers keep time in whole seconds
// only.
package journey
