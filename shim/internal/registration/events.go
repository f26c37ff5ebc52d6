package registration

import (
	"regexp"

	"github.com/samber/lo"
	"sigs.k8s.io/karpenter/pkg/events"
)

// noNodePool matches core's message about a Node whose NodePool it does not find. The group is the
// NodePool's name.
var noNodePool = regexp.MustCompile(`NodePool not found \(NodePool=([^)]*)\)`)

// CoreRecorder returns a recorder for core. It leaves out the events about Nodes that joined
// without the taint karpenter.sh/unregistered, one for each NodeClaim: the NodeClass names their
// node group instead ([Groups].ObserveTaint). It also drops reports that a NodePool was not found
// if that NodePool exists: packages outage and staticpool hide NodePools from core, and core would
// report it on each of their Nodes.
func CoreRecorder(recorder events.Recorder, exists func(nodePool string) bool) events.Recorder {
	return coreRecorder{recorder, exists}
}

type coreRecorder struct {
	events.Recorder

	exists func(nodePool string) bool
}

// Publish implements [events.Recorder].
func (r coreRecorder) Publish(published ...events.Event) {
	r.Recorder.Publish(lo.Reject(published, func(e events.Event, _ int) bool {
		if e.Reason == events.UnregisteredTaintMissing {
			return true
		}
		missing := noNodePool.FindStringSubmatch(e.Message)
		return e.Reason == events.DisruptionBlocked && missing != nil && r.exists(missing[1])
	})...)
}
