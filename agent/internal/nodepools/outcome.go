package nodepools

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const (
	// maxNamed is how many Clusters a condition's message names.
	maxNamed = 3
	// maxMessage and maxNote are the limits of the sizes of a condition's message and of an event's
	// text, in bytes. The API server accepts 32768 and 1024 characters. Spokes determine what both
	// quote.
	maxMessage = 8 << 10
	maxNote    = 1000
)

// outcome is what became of one set.
type outcome struct {
	set               string
	invalid           []string
	clusters, applied int32
	failing           []string // one line for each Cluster
	waiting           []string // names of Clusters
}

func newOutcome(set string, entries []entry) *outcome {
	o := &outcome{set: set}
	for _, e := range entries {
		if e.invalid != "" {
			o.invalid = append(o.invalid, e.invalid)
		}
	}
	return o
}

// add adds a Cluster that the set selects. The status is nil if the Cluster has no Spoke.
func (o *outcome) add(cluster string, published []*agentv1alpha1.PublishedObject, not []unpublished, status *v1alpha1.SpokeStatus) {
	o.clusters++
	var problems []string
	for _, u := range not {
		if u.set == o.set {
			problems = append(problems, u.message)
		}
	}
	waits := false
	for _, object := range published {
		if object.GetSet() != o.set {
			continue
		}
		of := object.GetKind() + " " + object.GetName() + ": "
		if object.GetProblem() != "" {
			problems = append(problems, of+object.GetProblem())
			continue
		}
		switch result := resultOf(status, object); {
		case result == nil:
			waits = true
		case !result.Applied:
			problems = append(problems, of+cmp.Or(result.Message, "not applied"))
		}
	}
	switch {
	case len(problems) > 0:
		o.failing = append(o.failing, cluster+": "+problems[0]+more(len(problems)-1))
	case waits:
		o.waiting = append(o.waiting, cluster)
	default:
		o.applied++
	}
}

func more(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" (and %d more)", n)
}

// resultOf returns what a spoke reports of exactly this content, or nil.
func resultOf(status *v1alpha1.SpokeStatus, object *agentv1alpha1.PublishedObject) *v1alpha1.SpokePublished {
	if status == nil {
		return nil
	}
	i := slices.IndexFunc(status.Published, func(p v1alpha1.SpokePublished) bool {
		return p.Kind == object.GetKind() && p.Name == object.GetName() && p.Revision == object.GetRevision()
	})
	if i < 0 {
		return nil
	}
	return &status.Published[i]
}

func (o *outcome) condition() metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ReadyCondition, Status: metav1.ConditionFalse}
	switch {
	case len(o.invalid) > 0:
		c.Reason, c.Message = v1alpha1.InvalidReason, first(o.invalid, "; ")
	case len(o.failing) > 0:
		c.Reason = v1alpha1.NotAppliedReason
		c.Message = fmt.Sprintf("%d of %d Clusters: %s", len(o.failing), o.clusters, first(o.failing, "; "))
	case len(o.waiting) > 0:
		c.Status, c.Reason = metav1.ConditionUnknown, v1alpha1.WaitingReason
		c.Message = fmt.Sprintf("%d of %d Clusters have not reported yet (their shims need --published-node-pools): %s",
			len(o.waiting), o.clusters, first(o.waiting, ", "))
	case o.clusters == 0:
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, v1alpha1.NoClustersReason, "clusterSelector selects no Cluster of this namespace"
	default:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.AppliedReason, fmt.Sprintf("applied in all %d Clusters", o.clusters)
	}
	c.Message = cut(c.Message, maxMessage)
	return c
}

// cut shortens a text to a number of bytes, at a character boundary.
func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	const ellipsis = "…"
	return strings.ToValidUTF8(text[:most-len(ellipsis)], "") + ellipsis
}

// first joins the first lines in order.
func first(lines []string, separator string) string {
	slices.Sort(lines)
	return strings.Join(lines[:min(len(lines), maxNamed)], separator) + more(max(0, len(lines)-maxNamed))
}
