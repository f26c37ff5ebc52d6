// Package timeline records how pending pods become nodes: NodeClaims in the spoke, claims and
// Machines in the hub, and Nodes in the spoke. It uses watches to record when each was first seen
// in each stage, because API servers only record whole seconds.
package timeline
